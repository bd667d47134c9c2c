"""What a generated text means to the program: its value, its thought, and the text that goes on.

Knows nothing of tokens, states or requests.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zipage_lang.errors import ParseError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.ir import Gen
from zipage_lang.plan import GenCall


@dataclasses.dataclass(frozen=True)
class Reading:
    """One sample as the program sees it. `text` goes on; `error` stands for a missing value."""

    text: str
    value: Any
    thinking: str
    error: ParseError | None = None


def read_output(node: Gen, output: RequestOutput, *, is_watched: bool) -> Reading:
    """Tell the thought from the answer, take off the marks that only end a value, parse the rest.

    A thought that the engine watches (`gen(think=...)`) stays in the text; separate_reasoning's
    does not.
    """
    text, answer, thinking = output.text, output.text, ""
    if node.thoughts is not None:
        thinking, text = node.thoughts.split(text)
        answer = text
    elif is_watched:
        thinking, answer = output.thinking, output.answer.lstrip("\n")
    if node.type is None:
        return Reading(text, answer, thinking)
    value_text = node.type.without_end_marks(answer)
    text = text[: len(text) - (len(answer) - len(value_text))]
    try:
        return Reading(text, node.type.read(value_text), thinking)
    except ValueError as error:
        failure = ParseError(node.name or "", node.type, value_text, output.finish_reason)
        failure.__cause__ = error
        return Reading(text, None, thinking, failure)


def fill_variables(
    call: GenCall, readings: Sequence[Reading], outputs: Sequence[RequestOutput]
) -> None:
    """Give the call's variables what the samples say; of several samples, lists.

    Where a sample's text does not parse, the value is the first such ParseError; meta is there.
    """
    is_one = call.sampling.n == 1
    meta = outputs[0] if is_one else list(outputs)
    if call.thinking is not None:
        thoughts = [reading.thinking for reading in readings]
        call.thinking.fill(thoughts[0] if is_one else thoughts, meta)
    error = next((reading.error for reading in readings if reading.error is not None), None)
    if error is not None:
        call.variable.miss(error, meta)
        return
    values = [reading.value for reading in readings]
    call.variable.fill(values[0] if is_one else values, meta)
