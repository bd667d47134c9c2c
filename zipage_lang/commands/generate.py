"""`zipage generate`: one prompt in, text out as it comes.

Knows nothing of how engines start or of templates.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zipage_lang.commands.completions import model_names
from zipage_lang.commands.flag_groups import ENGINE_GROUPS, sampling_groups
from zipage_lang.flags import takes_flags
from zipage_lang.one_line_errors import one_line_errors
from zipage_lang.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from zipage_lang.frontend.llm import Engine

app = typer.Typer(add_completion=False)


@app.command()
@takes_flags(sampling=sampling_groups(temperature=0.7, max_tokens=128), engine=ENGINE_GROUPS)
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask or continue; - reads it from stdin")],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="known name, folder, GGUF file or hub id",
            autocompletion=model_names,
        ),
    ] = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="a system message before the prompt")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="continue the text, without a chat template")
    ] = False,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Generate from one prompt.

    Prints the text as it comes. The prompt is one user message where the model has a chat template.
    """
    with one_line_errors():
        if raw and system is not None:
            raise ValueError("--system needs the chat template; leave out --raw")
        text = sys.stdin.read() if prompt == "-" else prompt
        params = SamplingParams(**sampling)
        from zipage_lang.commands.starting import started_engine

        with started_engine(model, engine) as running:
            asked = text if raw else _as_chat(running, text, system)
            for output in running.stream(asked, params):
                typer.echo(output.text_delta, nl=output.is_final)


def _as_chat(engine: "Engine", prompt: str, system: str | None) -> str | list[int]:
    """The prompt as one user message, where the model has a chat template."""
    tokenizer = engine.async_llm.tokenizer
    if not tokenizer.has_chat_template:
        if system is not None:
            raise ValueError("this model has no chat template, so it takes no --system")
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
