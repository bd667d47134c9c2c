"""Frozen expression nodes: what a program may append to its state.

Knows nothing of states, tokens or engines.
"""

import dataclasses
from typing import Any, Literal, get_args

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams

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

    `overrides` are the sampling fields the author set; the run's defaults fill the others.
    """

    name: str | None
    overrides: tuple[tuple[str, Any], ...] = ()
    kv: KVParams | None = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The one SamplingParams that travels on. Raises ValueError when the two do not go
        together.
        """
        return defaults.replace(**dict(self.overrides))

    def __repr__(self) -> str:
        fields = [repr(self.name), *(f"{name}={value!r}" for name, value in self.overrides)]
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


def gen(name: str | None = None, *, kv: KVParams | None = None, **sampling: Any) -> Gen:
    """Generate text and store it under `name`; with n > 1 a list of n texts, of which the first
    goes on.

    `sampling` takes every field of SamplingParams (max_tokens, stop, temperature, n, ...); a field
    left out or None takes the run's default. `kv` bounds this call's KV cache. Raises ValueError
    for an unknown field (the nearest name is given) or a value out of range.
    """
    overrides = {field: value for field, value in sampling.items() if value is not None}
    _check_alone(overrides)
    if name is not None:
        _check_name(name)
    return Gen(name, tuple(overrides.items()), kv)


def _check_alone(overrides: dict[str, Any]) -> None:
    """Validate before the run's defaults are known: they may allow more min_tokens than ours."""
    checked = dict(overrides)
    if isinstance(checked.get("min_tokens"), int) and "max_tokens" not in checked:
        checked["max_tokens"] = max(1, checked["min_tokens"])
    if "max_tokens" in checked and "min_tokens" not in checked:
        checked["min_tokens"] = 0
    SamplingParams(**checked)


def select(
    name: str,
    choices: list[str],
    method: SelectMethod = "token_length_normalized",
) -> Select:
    """Append the choice the model finds likeliest and store it under `name`.

    The scores and the distribution over all choices stand in `s.meta(name)`.
    Raises ValueError for no choices, an empty or repeated choice, or an unknown method.
    """
    _check_name(name)
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError(f"choices={choices!r} must be a list of at least one string")
    if "" in choices or len(set(choices)) != len(choices):
        raise ValueError(f"choices={choices!r} must be different and not empty")
    if method not in get_args(SelectMethod):
        raise ValueError(f"method={method!r} must be one of {', '.join(get_args(SelectMethod))}")
    return Select(name, tuple(choices), method)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r} must be a string that is not empty")


def _role(role: Role, body: Any) -> Concat:
    return Concat((RoleBegin(role), *parts_of(body), RoleEnd(role)))


def system(body: Any) -> Concat:
    """A system message, written as the model's chat template has it."""
    return _role("system", body)


def user(body: Any) -> Concat:
    """A user message."""
    return _role("user", body)


def assistant(body: Any) -> Concat:
    """An assistant message; with a gen inside it opens just as the template asks for a reply."""
    return _role("assistant", body)


def system_begin() -> RoleBegin:
    """Open a system message, to be closed by `system_end()`."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Open a user message, to be closed by `user_end()`."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Open an assistant message, to be closed by `assistant_end()`."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")
