"""`zipage serve`: flags to settings, then the server runs.

Knows nothing of HTTP or of engines.
"""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from zipage_lang.commands.completions import model_names
from zipage_lang.commands.flag_groups import ENGINE_GROUPS, SERVER_GROUPS
from zipage_lang.flags import takes_flags
from zipage_lang.one_line_errors import one_line_errors
from zipage_lang.server.config import ServerConfig

NEEDED = ("fastapi", "uvicorn", "prometheus_client")

app = typer.Typer(add_completion=False)


@app.command()
@takes_flags(server=SERVER_GROUPS, engine=ENGINE_GROUPS)
def serve(
    model: Annotated[
        str,
        typer.Argument(help="known name, folder, GGUF file or hub id", autocompletion=model_names),
    ],
    *,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve a model over HTTP, to OpenAI's clients too.

    Listens on http://127.0.0.1:8000; the live page is at /dashboard. SIGTERM or Ctrl-C lets running
    requests finish first, a second one ends at once.
    """
    with one_line_errors():
        settings = ServerConfig(**server)
        _check_extra(NEEDED)
        from zipage_lang.commands.starting import checked_config, short_name
        from zipage_lang.frontend.start_bar import start_bar
        from zipage_lang.server.run import serve as run_server

        config = checked_config(model, engine)
        with start_bar(short_name(model)) as report:
            run_server(config, settings, on_progress=report if sys.stderr.isatty() else None)


def _check_extra(needed: Sequence[str]) -> None:
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the server needs {', '.join(missing)}; run: pip install 'zipage-lang[serve]'"
        )
