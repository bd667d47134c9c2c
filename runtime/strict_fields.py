"""Unknown option names become one clear error that names the nearest known one.

Knows nothing of what the options mean.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def unknown_name_error(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown `name` of a `what`, with the nearest of the `known` names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return ValueError(f"unknown {what} {name!r}; {hint}")


def strict_fields(what: str) -> Any:
    """Class decorator for keyword-only dataclasses: unknown keywords raise ValueError."""

    def decorate(cls: type[T]) -> type[T]:
        plain_init = cls.__init__
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]

        def __init__(self: Any, **values: Any) -> None:
            for name in values:
                if name not in known:
                    raise unknown_name_error(what, name, known)
            plain_init(self, **values)

        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return decorate
