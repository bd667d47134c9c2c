"""Multiple choice: the last letter that the output names as its answer.

Knows nothing of the question or of what the options say.
"""

import re
from typing import Any

from zipage_lang.evaluation.checkers.checker import Verdict

LETTERS = "ABCDEFGHIJ"
_LETTER = rf"[(\[*$\s]*(?:\\text\{{)?\(?([{LETTERS}])\b(?![\w'])"
_IS = r"(?:\s+(?i:is|would be|must be))?\s*:?"
_SAID = re.compile(rf"\\boxed\{{{_LETTER}|\b(?i:answer|choice|option)\b{_IS}{_LETTER}")
_ALONE = re.compile(rf"^[(\[*\s]*([{LETTERS}])[)\].*\s]*$")


class Choice:
    """`\\boxed{B}`, "the answer is (B)", "Answer: B", or a last line that is the letter alone."""

    def check_answer(self, answer: Any) -> None:
        if not (isinstance(answer, str) and len(answer) == 1 and answer in LETTERS):
            raise ValueError(f"answer={answer!r:.80} must be one letter from A to {LETTERS[-1]}")

    def check(self, answer: Any, output: str) -> Verdict:
        given = chosen_letter(output)
        return Verdict(given == answer, given)


def chosen_letter(output: str) -> str | None:
    """The letter that the output settles on; None where it names none."""
    said = [first or second for first, second in _SAID.findall(output)]
    if said:
        return str(said[-1])
    lines = [line for line in output.splitlines() if line.strip()]
    alone = _ALONE.match(lines[-1]) if lines else None
    return alone.group(1) if alone else None
