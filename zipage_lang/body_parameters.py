"""The arguments of a program's body: which there are, and how a caller's values meet them.

Knows nothing of states, sampling fields' values or runs.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from zipage_lang.gen_words import SAMPLING_WORDS
from zipage_lang.runtime.strict_fields import unknown_name_error

RUN_WORDS = frozenset({"backend", "stream", "seed", "kv", "trace", "budget"})


class BodyParameters:
    """The parameters after the state. Raises ValueError where the function can't be a program."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._signature = inspect.signature(body)
        self.names = _names_after_state(body, self._signature)

    def takes(self, name: str) -> bool:
        """Whether a value may be given by this name."""
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        return name in self.names or inspect.Parameter.VAR_KEYWORD in kinds

    def check_bound(self, program: object, values: Collection[str]) -> None:
        """Raises ValueError for a name that can't be set ahead. `program` is named in errors."""
        for name in values:
            if not self.takes(name):
                raise unknown_name_error(f"argument of {program!r}", name, self.names)

    def match(
        self,
        program: object,
        bound: Mapping[str, Any],
        args: Iterable[Any],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The body's arguments by name. Positional ones fill the parameters that are not bound.

        Raises TypeError for a missing or surplus value, ValueError for an unknown name.
        """
        values = list(args)
        free = [name for name in self.names if name not in bound]
        if len(values) > len(free):
            raise TypeError(
                f"{program!r} takes {len(free)} positional arguments, got {len(values)}"
            )
        by_position = dict(zip(free, values, strict=False))
        for name in kwargs:
            if name in by_position:
                raise TypeError(f"{program!r} got two values for {name!r}")
            if not self.takes(name):
                known = [*self.names, *SAMPLING_WORDS, *RUN_WORDS]
                what = f"argument of {program!r} or sampling field"
                raise unknown_name_error(what, name, known)
        arguments = {**bound, **by_position, **kwargs}
        self._signature.bind(None, **arguments)  # raises TypeError for what is missing
        return arguments

    def split_sampling(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the body's arguments, sampling fields): a name that the body has is the body's."""
        fields = {
            name: value
            for name, value in kwargs.items()
            if name in SAMPLING_WORDS and name not in self.names
        }
        return {name: value for name, value in kwargs.items() if name not in fields}, fields


def item_arguments(item: Any) -> tuple[list[Any], dict[str, Any]]:
    """A batch item as (by position, by name). Raises ValueError for what is neither."""
    if isinstance(item, Mapping):
        return [], dict(item)
    if isinstance(item, list | tuple):
        return list(item), {}
    raise ValueError(f"batch item {item!r} must be a dict of arguments, or a list or tuple of them")


def _names_after_state(body: Callable[..., Any], signature: inspect.Signature) -> list[str]:
    """Names after the state. Raises ValueError where the function can't be a program."""
    parameters = list(signature.parameters.values())
    kinds = inspect.Parameter
    if not parameters or parameters[0].kind not in (
        kinds.POSITIONAL_ONLY,
        kinds.POSITIONAL_OR_KEYWORD,
    ):
        raise ValueError(f"{body!r} needs the state as its first parameter: def program(s, ...)")
    names = []
    for parameter in parameters[1:]:
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY):
            raise ValueError(f"{body!r}: parameter {parameter} can't be given by name; change it")
        if parameter.name in RUN_WORDS:
            raise ValueError(
                f"{body!r}: {parameter.name!r} is a word of run(); rename the parameter"
            )
        if parameter.kind is not kinds.VAR_KEYWORD:
            names.append(parameter.name)
    return names
