"""A Python type as what a generation must look like, and how its text becomes a value.

Plain types become a regex and are written bare: `42`, `true`, `blue`. Everything else becomes a
JSON schema. A bare value may open with one space, since most tokenizers write words that way, and a
number may be followed by one mark that ends it; the mark is cut from the text again.
Knows nothing of expressions, tokens or grammars' compilers.
"""

import dataclasses
import enum
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

INT = r"-?(0|[1-9][0-9]{0,17})"
FLOAT = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?"
QUOTED = r'"([^"\\\n]|\\["\\/bfnrt])*"'
END_MARKS = " \n.,;:)"  # after a number: whatever comes now is no part of it
END_CLASS = r"[ \n.,;:)]?"
SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()/]")
TRUTHS = {"true": True, "false": False, "True": True, "False": False}


@dataclasses.dataclass(frozen=True)
class ValueType:
    """What a typed gen asks of the engine, and how its text is read.

    `constraint` holds the sampling field that enforces it; `read` raises ValueError for a text that
    is no such value; `end_marks` may follow the value and are no part of it.
    """

    type: Any
    constraint: tuple[tuple[str, str], ...]
    read: Callable[[str], Any]
    end_marks: str = ""

    def __repr__(self) -> str:
        return getattr(self.type, "__name__", None) or repr(self.type)

    def without_end_marks(self, text: str) -> str:
        """The text up to where the value ends."""
        return text.rstrip(self.end_marks) if self.end_marks else text


def value_type(wanted: Any) -> ValueType:
    """The rules for a type. Raises ValueError for one that can't be described.

    int, float, bool, str, Literal and Enum of plain values; dataclasses, TypedDicts, pydantic
    models, and lists, dicts, tuples, unions and optionals of all of these.
    """
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return _one_of(wanted, {_bare(member.value): member for member in wanted})
    if get_origin(wanted) is Literal:
        return _one_of(wanted, {_bare(value): value for value in get_args(wanted)})
    if wanted is bool:
        return _one_of(bool, TRUTHS)
    if wanted is int:
        return ValueType(int, _regex(f" ?{INT}{END_CLASS}"), int, END_MARKS)
    if wanted is float:
        return ValueType(float, _regex(f" ?{FLOAT}{END_CLASS}"), float, END_MARKS)
    if wanted is str:
        return ValueType(str, (), str)
    return _json_type(wanted)


def quoted_type() -> ValueType:
    """A string in double quotes, as SGLang's `gen_string` has it; the value goes without them."""
    return ValueType(str, _regex(f" ?{QUOTED}"), _read_quoted)


def _regex(pattern: str) -> tuple[tuple[str, str], ...]:
    return (("regex", pattern),)


def _read_quoted(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise ValueError(f"{text!r} is no string in double quotes")
    return value


def _bare(value: Any) -> str:
    """A plain value as it stands in the text. Raises ValueError for values that are not plain."""
    if isinstance(value, enum.Enum):
        return _bare(value.value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str) and value and value == value.strip():
        return value
    raise ValueError(
        f"{value!r} can't be one of a typed gen's values; "
        "use numbers, bools, None, or strings without space at their ends"
    )


def _one_of(wanted: Any, values: Mapping[str, Any]) -> ValueType:
    if not values:
        raise ValueError(f"type={wanted!r} has no values")
    # Longest first, so that an engine that takes the first match does not stop at a prefix.
    texts = sorted(values, key=lambda text: (-len(text), text))
    # Only what every engine of regular expressions reads as special: re.escape quotes spaces too.
    pattern = "|".join(SPECIAL.sub(r"\\\g<0>", text) for text in texts)

    def read(text: str) -> Any:
        if text.strip() not in values:
            raise ValueError(f"it is none of {', '.join(values)}")
        return values[text.strip()]

    return ValueType(wanted, _regex(f" ?({pattern})"), read)


def _json_type(wanted: Any) -> ValueType:
    if _names_pydantic(wanted):
        return _pydantic_type(wanted)
    try:
        schema = msgspec.json.schema(wanted)
    except (TypeError, NameError) as error:
        raise ValueError(
            f"type={wanted!r} can't be described by a JSON schema ({error}); use int, float, bool, "
            "str, Literal, an Enum, a dataclass, a pydantic model, or lists and dicts of them"
        ) from error
    _check_described(wanted, schema)

    def read(text: str) -> Any:
        return msgspec.json.decode(text, type=wanted)  # its errors are ValueErrors

    return ValueType(wanted, (("json_schema", json.dumps(schema)),), read)


def _check_described(wanted: Any, schema: Mapping[str, Any]) -> None:
    if not schema:  # Any, object: every JSON text would do
        raise ValueError(f"type={wanted!r} allows anything; name the type that is meant")


def _names_pydantic(wanted: Any) -> bool:
    """Whether a pydantic model stands anywhere in the type."""
    if hasattr(wanted, "model_json_schema") and hasattr(wanted, "model_validate_json"):
        return True
    if dataclasses.is_dataclass(wanted):
        return any(_names_pydantic(field.type) for field in dataclasses.fields(wanted))
    return any(_names_pydantic(argument) for argument in get_args(wanted))


def _pydantic_type(wanted: Any) -> ValueType:
    # Whoever has a pydantic model has imported pydantic; the language itself does without.
    adapter = sys.modules["pydantic"].TypeAdapter(wanted)
    schema = json.dumps(adapter.json_schema())
    return ValueType(wanted, (("json_schema", schema),), adapter.validate_json)
