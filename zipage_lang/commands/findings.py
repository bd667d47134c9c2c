"""One line of a check-up: what was looked at, how it stands, what to do.

Knows nothing of what is looked at.
"""

import dataclasses
from typing import Literal

Status = Literal["ok", "warn", "missing"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """`advice` is there unless the status is ok."""

    status: Status
    name: str
    value: str
    advice: str = ""


def good(name: str, value: str) -> Finding:
    """As it should be."""
    return Finding("ok", name, value)


def warn(name: str, value: str, advice: str) -> Finding:
    """Works, but not as well as it might, or not all of it."""
    return Finding("warn", name, value, advice)


def bad(name: str, value: str, advice: str) -> Finding:
    """Without it nothing runs on this machine."""
    return Finding("missing", name, value, advice)
