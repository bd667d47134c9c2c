"""`zipage calibrate`: a model's forecast of attention, made once and kept.

Knows nothing of how a forecast is fitted.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from zipage_lang.commands.completions import model_names
from zipage_lang.flags import FlagGroup, takes_flags
from zipage_lang.one_line_errors import one_line_errors
from zipage_lang.runtime.config import ModelConfig
from zipage_lang.runtime.model_store import is_hub_id, resolve_model

app = typer.Typer(add_completion=False)
MODEL_GROUPS = (
    FlagGroup(heading="The engine", settings=ModelConfig, only=("dtype", "backend", "num_threads")),
)


@app.command()
@takes_flags(settings=MODEL_GROUPS)
def calibrate(
    model: Annotated[
        str,
        typer.Argument(help="known name, folder, GGUF file or hub id", autocompletion=model_names),
    ],
    out: Annotated[
        Path | None, typer.Option(help="the file; else in the cache, where engines look")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines {"prompt": ...} that its texts start with')
    ] = None,
    texts: Annotated[int | None, typer.Option(help="how many it writes", min=2)] = None,
    length: Annotated[int | None, typer.Option(help="tokens of a text at most", min=8)] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Make a model's forecast of attention.

    The policy `zipage2` reads it. Prints where it lies.
    """
    with one_line_errors():
        asked = ModelConfig(model=model, **settings)
        if not is_hub_id(model):
            resolve_model(model)  # its mistakes before torch is loaded
        from zipage_lang.runtime.calibrate import calibrate_model

        with _told_lines():
            file = calibrate_model(asked, out, prompts=prompts, num_texts=texts, max_len=length)
        typer.echo(file)


@contextlib.contextmanager
def _told_lines() -> Iterator[None]:
    """What is said of the calibration goes to stderr, in this block only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("zipage: %(message)s"))
    logger = logging.getLogger("zipage.engine")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
