"""A dataclass field that says what it is for, in words that flags and the reference page repeat.

Knows nothing of what the settings mean.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


def documented(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A field with its default, or a `factory` of it, and its `help` in the field's metadata."""
    metadata = {"help": help}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
