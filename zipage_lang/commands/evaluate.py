"""`zipage eval`, which stands with what it starts (`evaluation/command.py`), with engine flags too.

Knows nothing of evaluation.
"""

import functools
import inspect
from typing import Any

import typer

from zipage_lang.commands.flag_groups import EVAL_GROUPS
from zipage_lang.evaluation.command import evaluate
from zipage_lang.flags import takes_flags

app = typer.Typer(add_completion=False)


@functools.wraps(evaluate)
def evaluate_with_flags(*, options: dict[str, Any], **own: Any) -> None:
    pairs = [f"{name}={value}" for name, value in options.items()]
    own["engine"] = [*(own["engine"] or []), *pairs]
    evaluate(**own)


_OWN = inspect.signature(evaluate)
_OPTIONS = inspect.Parameter("options", inspect.Parameter.KEYWORD_ONLY)
evaluate_with_flags.__signature__ = _OWN.replace(  # type: ignore[attr-defined]
    parameters=[*_OWN.parameters.values(), _OPTIONS]
)
app.command()(takes_flags(options=EVAL_GROUPS)(evaluate_with_flags))
