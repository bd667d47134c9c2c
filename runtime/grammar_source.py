"""A grammar as the caller gave it: its kind and text, and the limits that bound its compilation.

Knows nothing of tokens or of how grammars are compiled.
"""

import dataclasses
import json
import re
from typing import Any, Literal

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_NESTING = 64  # brackets, or levels of a schema: compilation recurses
MAX_PROPERTIES = 500  # of one object: memory grows with the square of the optional ones

GrammarKind = Literal["regex", "json_schema", "ebnf", "lark", "structural_tag"]


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarSource:
    """What an answer must match. Equal sources share one compiled grammar."""

    kind: GrammarKind
    text: str
    any_whitespace: bool = False  # of JSON; otherwise ", " and ": " between its parts, nothing else


def check_grammar_text(name: str, text: Any) -> str:
    """`text` if it is small enough to compile. Raises ValueError otherwise."""
    if not isinstance(text, str):
        raise ValueError(f"{name}={text!r:.80} must be a string")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has a lone surrogate at character {error.start}") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(
            f"{name} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} can be compiled in time: "
            "make it smaller"
        )
    if not text:
        raise ValueError(f"{name} is empty; leave it out (None) for an output without a grammar")
    return text


def check_nesting(name: str, text: str) -> str:
    """`text` if its brackets nest no deeper than MAX_NESTING. Raises ValueError otherwise."""
    depth = 0
    plain = re.sub(r"\\.", "  ", text, flags=re.DOTALL)  # what is escaped nests nothing
    for place, character in enumerate(plain):
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_NESTING:
            raise ValueError(
                f"{name} nests more than {MAX_NESTING} brackets at character {place}; flatten it"
            )
    return text


def canonical_schema(schema: Any) -> str:
    """A JSON schema as compact JSON; the order of its properties is the order of the output.

    Args:
        schema: a dict, a bool, or a JSON text of one.
    Raises ValueError for what is no JSON, and for schemas too large or too deep.
    """
    return _canonical("json_schema", schema, (dict, bool))


def canonical_tag(tag: Any) -> str:
    """A structural tag as compact JSON. Args and errors as `canonical_schema`, without bools."""
    return _canonical("structural_tag", tag, (dict,))


def _canonical(name: str, value: Any, kinds: tuple[type, ...]) -> str:
    if isinstance(value, str):
        check_grammar_text(name, value)
        value = _parse(name, value)
    if not isinstance(value, kinds):
        raise ValueError(f"{name}={value!r:.80} must be an object, or a JSON text of one")
    _check_shape(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} can't be written as JSON: {error}") from error
    return check_grammar_text(name, text)


def _parse(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{name} nests more than {MAX_NESTING} levels; flatten it") from error


def _check_shape(name: str, value: Any) -> None:
    """Level by level, so that a deep value can't exhaust the stack here."""
    level, depth = [value], 0
    while level:
        if depth > MAX_NESTING:
            raise ValueError(f"{name} nests more than {MAX_NESTING} levels; flatten it")
        for part in level:
            if isinstance(part, dict) and len(part) > MAX_PROPERTIES:
                raise ValueError(
                    f"{name} has an object of {len(part)} entries; at most "
                    f"{MAX_PROPERTIES} can be compiled: split it"
                )
        level = [child for part in level for child in _children(part)]
        depth += 1


def _children(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(part.values())
    return list(part) if isinstance(part, (list, tuple)) else []
