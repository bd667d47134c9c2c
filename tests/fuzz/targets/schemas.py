"""JSON schemas, structural tags and texts of typed values: canonical, or refused with a reason.

Knows nothing of compilers.
"""

import dataclasses
import enum
import json
import math
from typing import Any, Literal, TypedDict

from test_support.fuzz_input import Choices, words_of

from zipage_lang.runtime.grammar_source import canonical_schema, canonical_tag
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.types import quoted_type, value_type

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/c"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"enum": [1, "x", None]}},
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "x"}},
}
WORDS = (*words_of(SCHEMA, TAG), "anyOf", "minItems", "pattern")


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


@dataclasses.dataclass
class Point:
    x: int
    y: float
    tags: list[str] = dataclasses.field(default_factory=list)


class Named(TypedDict):
    name: str


KINDS: tuple[Any, ...] = (
    *(int, float, bool, str, Colour, Literal["a", 1, None], Point, Named, list[int]),
    *(dict[str, float], tuple[int, str], int | None, list[Point] | bool),
)
VALUE_TYPES = (*map(value_type, KINDS), quoted_type())


def target(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.below(4)
    if kind == 3:
        check_value(choices)
        return
    field, template, canonical = (
        ("json_schema", SCHEMA, canonical_schema),
        ("structural_tag", TAG, canonical_tag),
    )[choices.below(2)]
    given = choices.rest().decode("utf-8", "surrogateescape") if kind == 0 else None
    if given is None:
        given = choices.changed(template, WORDS)
    if kind == 2:
        given = json.dumps(given)
    try:
        text = canonical(given)
        made = SamplingParams(**{field: given})
    except ValueError as error:
        assert str(error)
        return
    assert made.grammar is not None
    assert made.grammar.text == text
    assert canonical(text) == text


def check_value(choices: Choices) -> None:
    """A text is read as a value of its type, or refused with a ValueError."""
    kind = choices.pick(VALUE_TYPES)
    text = (
        choices.text(40) if choices.flag() else json.dumps(choices.value(("x", "y", "name", "red")))
    )
    try:
        value = kind.read(kind.without_end_marks(text))
    except ValueError as error:
        assert str(error)
        return
    if kind.type is int:
        assert type(value) is int
    if kind.type is float:
        assert isinstance(value, float) or math.isnan(value)
