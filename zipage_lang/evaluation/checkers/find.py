"""Checkers by name.

Knows nothing of how any of them works.
"""

from collections.abc import Callable, Mapping

from zipage_lang.evaluation.checkers.boxed import BoxedMath
from zipage_lang.evaluation.checkers.checker import Checker
from zipage_lang.evaluation.checkers.choice import Choice
from zipage_lang.evaluation.checkers.exact import Exact
from zipage_lang.evaluation.checkers.family_answer import FAMILY_PREFIX, FamilyAnswer
from zipage_lang.evaluation.checkers.python_tests import PythonTests
from zipage_lang.evaluation.families import find_family

CHECKERS: Mapping[str, Callable[[], Checker]] = {
    "boxed": BoxedMath,
    "choice": Choice,
    "exact": Exact,
    "python": PythonTests,
}


def find_checker(name: str) -> Checker:
    """A checker by its name, or `family:NAME`. Raises ValueError that lists the known ones."""
    if name.startswith(FAMILY_PREFIX):
        return FamilyAnswer(find_family(name.removeprefix(FAMILY_PREFIX)))
    if name not in CHECKERS:
        known = ", ".join([*sorted(CHECKERS), FAMILY_PREFIX + "NAME"])
        raise ValueError(f"checker {name!r} is not known; known: {known}")
    return CHECKERS[name]()
