"""What a checker is, and what it says of one output.

Knows nothing of any particular kind of answer.
"""

import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Of one output."""

    is_correct: bool
    answer: str | None = None  # equal texts are one vote; None: no answer was found
    note: str | None = None  # why it failed, where there is more to say


class Checker(Protocol):
    """One kind of answer. Holds no state of a problem; may be called from several threads."""

    def check_answer(self, answer: Any) -> None:
        """Raise ValueError where a task's answer is none that this checker can hold against."""

    def check(self, answer: Any, output: str) -> Verdict:
        """Whether the model's text after the prompt is right. Never raises because of `output`."""
