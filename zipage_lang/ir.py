"""Frozen expression nodes: what a program may append to its state.

Knows nothing of states, tokens or engines.
"""

import dataclasses
import re
from typing import Any, Literal

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.thoughts import ThoughtMarks
from zipage_lang.types import ValueType

Role = Literal["system", "user", "assistant"]
SelectMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]


class Expr:
    """Base of all nodes. Nodes and strings concatenate with `+`."""

    def __add__(self, other: Any) -> "Concat":
        return Concat((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: Any) -> "Concat":
        return Concat((*parts_of(other), *parts_of(self)))

    def __format__(self, spec: str) -> str:
        # An f-string would write the node's repr into the prompt without a word.
        raise TypeError(f"{self!r} can't stand in an f-string; join it to the text with +")


@dataclasses.dataclass(frozen=True)
class Text(Expr):
    """Constant text of the author."""

    text: str


@dataclasses.dataclass(frozen=True)
class Gen(Expr):
    """Generate and store under `name` (None: only into the text).

    `overrides` are the sampling fields the author set; the run's defaults fill the others. With
    `type` the value is parsed; with `thoughts` a thought between these marks leaves the text; a
    match of `stop_pattern` ends the text and is no part of it.
    """

    name: str | None
    overrides: tuple[tuple[str, Any], ...] = ()
    kv: KVParams | None = None
    type: ValueType | None = None
    thoughts: ThoughtMarks | None = None
    stop_pattern: "re.Pattern[str] | None" = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The one SamplingParams that travels on. Raises ValueError when the two do not go
        together.
        """
        constraint = dict(self.type.constraint) if self.type is not None else {}
        return defaults.replace(**constraint, **dict(self.overrides))

    def __repr__(self) -> str:
        fields = [repr(self.name), *(f"{name}={value!r}" for name, value in self.overrides)]
        if self.type is not None:
            fields.append(f"type={self.type!r}")
        if self.kv is not None:
            fields.append(f"kv={self.kv!r}")
        return f"gen({', '.join(fields)})"


@dataclasses.dataclass(frozen=True)
class Select(Expr):
    """Score every choice as a continuation and append the best one."""

    name: str
    choices: tuple[str, ...]
    method: SelectMethod = "token_length_normalized"

    def __repr__(self) -> str:
        return f"select({self.name!r}, choices={list(self.choices)!r}, method={self.method!r})"


@dataclasses.dataclass(frozen=True)
class Score(Expr):
    """Score every choice as a continuation and append none."""

    name: str
    choices: tuple[str, ...]
    method: SelectMethod = "token_length_normalized"

    def __repr__(self) -> str:
        return f"score({self.name!r}, choices={list(self.choices)!r}, method={self.method!r})"


@dataclasses.dataclass(frozen=True)
class Keep(Expr):
    """Constant text that no compaction may touch, nor anything before it."""

    text: str


@dataclasses.dataclass(frozen=True)
class ScopeBegin(Expr):
    """From here on, until its end, text belongs to the value of `name`."""

    name: str


@dataclasses.dataclass(frozen=True)
class ScopeEnd(Expr):
    """The value of `name` is complete."""

    name: str


@dataclasses.dataclass(frozen=True)
class RoleBegin(Expr):
    """Open a chat message."""

    role: Role


@dataclasses.dataclass(frozen=True)
class RoleEnd(Expr):
    """Close the open chat message."""

    role: Role


@dataclasses.dataclass(frozen=True)
class Concat(Expr):
    """Parts in order; never nested."""

    parts: tuple[Expr, ...]

    def __repr__(self) -> str:
        return " + ".join(repr(part) for part in self.parts)


def parts_of(value: Any) -> tuple[Expr, ...]:
    """The flat parts of a string or node. Raises ValueError for anything else, None among it."""
    if isinstance(value, str):
        return (Text(value),)
    if isinstance(value, Concat):
        return value.parts
    if isinstance(value, Expr):
        return (value,)
    raise ValueError(
        f"{value!r} of type {type(value).__name__} can't be appended; "
        "use a string, gen(...), select(...) or a role"
    )


def checked_name(name: Any) -> str:
    """The name of a value. Raises ValueError for what can't be one."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r} must be a string that is not empty")
    return name
