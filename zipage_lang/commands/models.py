"""`zipage models`: what is here, how to get more, and what a model is.

Knows nothing of how models are stored or read.
"""

from typing import Annotated

import typer

from zipage_lang.commands.completions import model_names
from zipage_lang.one_line_errors import one_line_errors
from zipage_lang.runtime.model_store import list_models, pull_model

app = typer.Typer(
    add_completion=False,
    help="Get models and see which are here.",
    no_args_is_help=True,
)


@app.callback()
def models() -> None:
    """Get models and see which are here."""


@app.command("list")
def list_known() -> None:
    """The known models and where each one lies."""
    with one_line_errors():
        for model in list_models():
            place = model.path or f"not here; run: zipage models pull {model.name}"
            typer.echo(f"{model.name}  {model.about}\n    {place}")


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="a known name or a Hugging Face id", autocompletion=model_names)
    ],
) -> None:
    """Fetch a model, check it, and print where it lies."""
    with one_line_errors():
        path = pull_model(name, lambda line: typer.echo(line, err=True))
        typer.echo(path)


@app.command()
def info(
    name: Annotated[
        str,
        typer.Argument(
            help="known name, folder, GGUF file, hub id, or a published shape such as qwen3-8b",
            autocompletion=model_names,
        ),
    ],
) -> None:
    """What a model is, and the memory that weights and KV cache take."""
    with one_line_errors():
        from zipage_lang.commands.model_facts import facts_of  # brings torch

        for what, value in facts_of(name).lines():
            typer.echo(f"{what:<14} {value}")
