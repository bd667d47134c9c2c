"""Mathematical answers: the last boxed expression, equal to the known answer.

Equal texts and equal plain numbers are settled here; all else goes to a process of its own
(`math_process.py`), which may take only so long. Knows nothing of sympy or LaTeX beyond braces.
"""

import re
from fractions import Fraction
from typing import Any

from zipage_lang.evaluation.checkers.checker import Verdict
from zipage_lang.evaluation.checkers.math_process import MathProcess

MAX_ANSWER_LEN = 400  # characters; longer ones are compared as text only
_BOX = re.compile(r"\\f?boxed\s*\{")
_SAID = re.compile(r"(?:^|\n)\s*####\s*(.+)|\b(?i:answer)\b(?:\s+(?i:is))?\s*:?\s*([^\n]+)")
_PLAIN = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}")
_DROPPED = (
    *("\\left", "\\right", "\\!", "\\,", "\\;", "\\:", "\\ ", "~", "\\$", "$"),
    *("^\\circ", "^{\\circ}"),
)


class BoxedMath:
    """Right where the boxed answer is mathematically the same, exactly, not by rounding.

    Without a box: what follows the last `####` or "answer is".
    """

    def __init__(self) -> None:
        self._process = MathProcess()

    def check_answer(self, answer: Any) -> None:
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise ValueError(f"answer={answer!r:.80} must be a number or a text in LaTeX")

    def check(self, answer: Any, output: str) -> Verdict:
        given = final_answer(output)
        if given is None:
            return Verdict(False)
        wanted = as_text(answer)
        is_correct = self.are_equal(wanted, given)
        # All right answers are one vote, however they are written.
        return Verdict(is_correct, plain_form(wanted if is_correct else given))

    def are_equal(self, left: str, right: str) -> bool:
        """Whether two answers in LaTeX are the same."""
        if plain_form(left) == plain_form(right):
            return True
        numbers = plain_number(left), plain_number(right)
        if numbers[0] is not None and numbers[1] is not None:
            return numbers[0] == numbers[1]
        if max(len(left), len(right)) > MAX_ANSWER_LEN:
            return False
        return self._process.are_equal(left, right)


def final_answer(output: str) -> str | None:
    """What the output gives as its answer; None where it gives none."""
    boxes = list(_BOX.finditer(output))
    if boxes:
        return _braced(output, boxes[-1].end())
    said = [first or second for first, second in _SAID.findall(output)]
    return said[-1].strip().rstrip(".").strip() or None if said else None


def as_text(answer: Any) -> str:
    """A task's answer as text; 27.0 is 27."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer)


def plain_form(text: str) -> str:
    """The text without what says nothing: spaces, dollar signs, degree signs, a final dot."""
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    return re.sub(r"\s+", "", text).rstrip(".")


def plain_number(text: str) -> Fraction | None:
    """The value of a plain integer, decimal or fraction; None for all else."""
    form = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain_form(text).replace("{,}", ","))
    fraction = _FRACTION.fullmatch(form)
    if fraction:
        form = _as_ratio(fraction)
    if not _PLAIN.fullmatch(form):
        return None
    above, _, below = form.partition("/")
    if below and int(below) == 0:
        return None
    return Fraction(above) / Fraction(below or "1")


def _as_ratio(match: re.Match[str]) -> str:
    sign, above, below = match.group(1), int(match.group(2)), int(match.group(3))
    if below < 0:
        above, below = -above, -below
    return f"{-above if sign else above}/{below}"


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace before `start` and its partner; None where it has none."""
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 2  # an escaped brace is a character
            continue
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index].strip() or None
        index += 1
    return None
