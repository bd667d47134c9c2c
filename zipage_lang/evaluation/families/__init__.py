"""The problem families by name.

Knows nothing of what the families ask or how they are scored.
"""

from collections.abc import Mapping
from types import MappingProxyType

from zipage_lang.evaluation.families.countdown import Countdown
from zipage_lang.evaluation.families.family import Family
from zipage_lang.evaluation.families.multiply import Multiply
from zipage_lang.evaluation.families.recall import Recall
from zipage_lang.evaluation.families.trace import Trace

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (Countdown(), Trace(), Multiply(), Recall())}
)


def find_family(name: str) -> Family:
    """The family called `name`. Raises ValueError, with the names there are."""
    try:
        return FAMILIES[name]
    except KeyError:
        known = ", ".join(FAMILIES)
        raise ValueError(f"family={name!r} is not known; give one of {known}") from None
