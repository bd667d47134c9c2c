"""`zipage engine`: an engine by itself, for a client that joins it over TCP, and the keys for both.

Knows nothing of sockets or of how keys are written.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from zipage_lang.commands.completions import model_names
from zipage_lang.commands.flag_groups import ENGINE_GROUPS
from zipage_lang.flags import takes_flags
from zipage_lang.one_line_errors import one_line_errors

app = typer.Typer(
    add_completion=False,
    help="Run an engine by itself, for a client elsewhere.",
    no_args_is_help=True,
)


@app.callback()
def engine() -> None:
    """Run an engine by itself, for a client elsewhere."""


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="where the folders engine and client are made")],
) -> None:
    """Make CURVE keys for an engine and one client.

    FOLDER/engine stays with the engine (its secret key, and the public keys of clients it lets in);
    FOLDER/client goes to the client. A further client's public key (client.key) belongs into
    FOLDER/engine/clients.
    """
    from zipage_lang.runtime.curve_keys import make_keys

    with one_line_errors():
        for made in make_keys(folder):
            typer.echo(made)


@app.command()
@takes_flags(engine=ENGINE_GROUPS)
def run(
    model: Annotated[
        str,
        typer.Argument(help="known name, folder, GGUF file or hub id", autocompletion=model_names),
    ],
    *,
    listen: Annotated[
        str, typer.Option(help="tcp://host:port; a host of 0.0.0.0 is every network, port 0 any")
    ],
    keys: Annotated[
        Path | None, typer.Option(help="the folder engine of `zipage engine keys`; needed")
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Load a model and wait for a client, `AsyncLLM.connect`.

    One client at a time; the model stays loaded when it leaves. SIGTERM or Ctrl-C ends it.
    """
    with one_line_errors():
        if keys is None:
            raise ValueError(
                f"{listen} without keys is refused: plain TCP is not spoken; make some with "
                "`zipage engine keys FOLDER` and give --keys FOLDER/engine"
            )
        from zipage_lang.commands.starting import checked_config
        from zipage_lang.runtime.remote_engine import serve_engine  # brings torch

        config = checked_config(model, engine)
        serve_engine(config, listen, str(keys), lambda address: typer.echo(f"ready at {address}"))
