"""Exact answers: the whole output is the answer, spaces around it aside.

Knows nothing of mathematics or code.
"""

from typing import Any

from zipage_lang.evaluation.checkers.checker import Verdict


class Exact:
    """Right where the stripped output equals the stripped answer, or one of several."""

    def check_answer(self, answer: Any) -> None:
        accepted = answer if isinstance(answer, list) else [answer]
        if not accepted or not all(isinstance(item, str) for item in accepted):
            raise ValueError(f"answer={answer!r:.80} must be a text or a list of texts")

    def check(self, answer: Any, output: str) -> Verdict:
        accepted = answer if isinstance(answer, list) else [answer]
        given = output.strip()
        return Verdict(given in [item.strip() for item in accepted], given or None)
