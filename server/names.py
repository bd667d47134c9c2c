"""What callers may call their requests and groups: one line of text that shows as it is.

Names stand in answers, logs and traces; none may begin a line of its own there or hide a part of
one. Knows nothing of whose names they are.
"""

from typing import Annotated

from pydantic import AfterValidator, Field, StrictStr
from pydantic_core import PydanticCustomError

MAX_LEN = 256


def _plain(name: str) -> str:
    if name.isprintable():
        return name
    raise PydanticCustomError("not_plain", "must be one line of printable characters")


PlainText = Annotated[StrictStr, Field(max_length=MAX_LEN), AfterValidator(_plain)]  # may be ""
Name = Annotated[PlainText, Field(min_length=1)]
