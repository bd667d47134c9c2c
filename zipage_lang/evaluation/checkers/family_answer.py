"""Answers of the built-in families: the family itself checks, its answer line votes.

Knows nothing of what a family asks.
"""

from typing import Any

from zipage_lang.evaluation.checkers.checker import Verdict
from zipage_lang.evaluation.families.family import Family, final_answer

FAMILY_PREFIX = "family:"


class FamilyAnswer:
    """Wraps a family's own check."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def check_answer(self, answer: Any) -> None:
        if not isinstance(answer, str):
            raise ValueError(f"answer={answer!r:.80} of family {self._family.name} must be a text")

    def check(self, answer: Any, output: str) -> Verdict:
        return Verdict(self._family.check(answer, output), final_answer(output))
