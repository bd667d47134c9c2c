"""The `zipage` command: models, a quick generation, an evaluation, a trace's page, the version.

Mistakes of the caller become one line on stderr, not a traceback.
Knows nothing of how models are stored or how an engine runs.
"""

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from zipage_lang.evaluation.command import evaluate
from zipage_lang.frontend.llm import Engine
from zipage_lang.one_line_errors import one_line_errors
from zipage_lang.runtime.model_store import list_models, pull_model
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.trace_page import make_page

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(
    name="zipage",
    help="A language for multi-call reasoning programs on an engine whose memory is bounded.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
models_app = typer.Typer(help="Get models and see which are here.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.command("eval")(evaluate)


@models_app.command("pull")
def pull(name: Annotated[str, typer.Argument(help="a known name or a Hugging Face id")]) -> None:
    """Fetch a model, check it, and print where it lies."""
    with one_line_errors():
        path = pull_model(name, lambda line: typer.echo(line, err=True))
        typer.echo(path)


@models_app.command("list")
def list_known() -> None:
    """The known models and where each one lies."""
    with one_line_errors():
        for model in list_models():
            place = model.path or f"not here; run: zipage models pull {model.name}"
            typer.echo(f"{model.name}  {model.about}\n    {place}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask or continue")],
    model: Annotated[str, typer.Option(help="known name, folder, GGUF file or hub id")] = (
        DEFAULT_MODEL
    ),
    max_tokens: Annotated[int, typer.Option(help="output tokens at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="makes a sampled output repeatable")] = None,
    raw: Annotated[bool, typer.Option(help="continue the text, without a chat template")] = False,
) -> None:
    """Generate from one prompt and print the text as it comes."""
    with one_line_errors():
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        with Engine(model) as engine:
            asked = prompt if raw else _as_chat(engine, prompt)
            for output in engine.stream(asked, sampling):
                typer.echo(output.text_delta, nl=output.is_final)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="what run(trace=...) or ZIPAGE_TRACE wrote")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page; else FILE with .html")
    ] = None,
    last: Annotated[int | None, typer.Option(help="only so many of the last runs", min=1)] = None,
) -> None:
    """Make one self-contained HTML page of a trace file and print where it lies."""
    with one_line_errors():
        page, notes = make_page(file, out or file.with_suffix(".html"), last)
        for note in notes:
            typer.echo(f"zipage: {file}: {note}", err=True)
        typer.echo(page)


@app.command()
def version() -> None:
    """Print the installed version."""
    typer.echo(importlib.metadata.version("zipage-lang"))


def main() -> None:
    """Entry point of the `zipage` command."""
    app()


def _as_chat(engine: Engine, prompt: str) -> str | list[int]:
    """The prompt as one user message, where the model has a chat template."""
    tokenizer = engine.async_llm.tokenizer
    if not tokenizer.has_chat_template:
        return prompt
    rendered = tokenizer.render_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(rendered, add_special_tokens=False)
