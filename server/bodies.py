"""Lists and objects of request bodies: the first wrong part is told, and no other is looked for.

pydantic would note each of them: a body of 16 MiB would take ten GiB and minutes of the event loop.
Knows nothing of what the parts mean.
"""

import dataclasses
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, GetCoreSchemaHandler, TypeAdapter

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FirstWrong:
    """On a list. pydantic's own FailFast has no hash, so that it may not stand in a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


Items = Annotated[list[T], FirstWrong()]


def values_of(kind: Any) -> BeforeValidator:
    """On a dict with values of that kind."""
    adapter = TypeAdapter(kind)

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            for part in value.values():
                adapter.validate_python(part)
        return value

    return BeforeValidator(check)
