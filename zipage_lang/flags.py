"""Command-line flags made from settings: each documented dataclass field is one flag.

`max_running: int = documented(64, "rows")` is `--max-running 64`; a bool is `--x / --no-x`, a tuple
a flag that may be repeated. A flag that is not given leaves the field's own default.
Knows nothing of what the settings mean.
"""

import dataclasses
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

Command = Callable[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagGroup:
    """Some fields of one settings class, under one heading of the help."""

    heading: str
    settings: type[Any]
    only: Sequence[str] = ()  # these fields; none: all
    skip: Sequence[str] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the command's own
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # field -> variable

    def flags(self) -> "Iterator[Flag]":
        """A flag for each of the fields."""
        kinds = typing.get_type_hints(self.settings)
        for field in dataclasses.fields(self.settings):
            if field.name in self.skip or (self.only and field.name not in self.only):
                continue
            default = default_of(field)
            yield Flag(
                name=field.name,
                kind=kinds[field.name],
                field_default=default,
                default=self.defaults.get(field.name, default),
                help=str(field.metadata.get("help", "")),
                heading=self.heading,
                variable=self.environment.get(field.name),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag, as it is declared to typer."""

    name: str
    kind: Any  # the field's type
    field_default: Any
    default: Any  # the command's
    help: str
    heading: str
    variable: str | None  # of the environment, read where the flag is not given

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(part) in (list, tuple) for part in _parts(self.kind))

    @property
    def option(self) -> str:
        """`--max-running`; a list's flag names one item: `--api-key` of `api_keys`."""
        name = self.name.removesuffix("s") if self.is_list else self.name
        return "--" + name.replace("_", "-")

    @property
    def declaration(self) -> str:
        """What typer is told. A bool that is not False by itself has its opposite too."""
        has_opposite = _parts(self.kind)[0] is bool and self.default is not False
        return f"{self.option}/--no-{self.option[2:]}" if has_opposite else self.option

    @property
    def parameter(self) -> inspect.Parameter:
        """The command's parameter, as typer reads it."""
        kind = list[str] if self.is_list else _parts(self.kind)[0]
        shown = typer.Option(
            self.declaration,
            help=self.help.replace("None:", "unset:"),
            rich_help_panel=self.heading,
            envvar=self.variable,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default or None if self.is_list else self.default,
            annotation=Annotated[kind | None, shown],
        )


def takes_flags(**groups: Sequence[FlagGroup]) -> Callable[[Command], Command]:
    """Decorator: the command's parameter of each given name becomes flags.

    The command gets a dict, by field name, of the values that are not the field's own default. A
    field that several groups have is a flag once, of the group that stands first.
    """

    def decorate(command: Command) -> Command:
        owners: dict[str, tuple[str, Flag]] = {}
        for parameter, parts in groups.items():
            for flag in itertools.chain.from_iterable(part.flags() for part in parts):
                owners.setdefault(flag.name, (parameter, flag))

        @functools.wraps(command)
        def with_flags(**values: Any) -> None:
            given: dict[str, dict[str, Any]] = {parameter: {} for parameter in groups}
            for name, (parameter, flag) in owners.items():
                value = values.pop(name)
                if value is not None and value != flag.field_default:
                    given[parameter][name] = value
            command(**values, **given)

        signature = inspect.signature(command, eval_str=True)
        own = [item for name, item in signature.parameters.items() if name not in groups]
        made = [flag.parameter for _, flag in owners.values()]
        with_flags.__signature__ = signature.replace(parameters=own + made)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {}
        return with_flags

    return decorate


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """A field's default, also where a factory makes it; None where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def type_text(kind: Any) -> str:
    """A type as people read it: `whole number`, `off, fixed or adaptive`, `texts`."""
    words = [_word(part) for part in _parts(kind) if part is not types.NoneType]
    return " or ".join(dict.fromkeys(words))


_WORDS = {int: "whole number", float: "number", bool: "on or off", str: "text"}


def _word(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(map(str, arguments[:-1])) + f" or {arguments[-1]}"
    if origin in (list, tuple):
        return f"{_word(arguments[0])}s"
    if origin is dict or kind is dict:
        return "mapping"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def _parts(kind: Any) -> tuple[Any, ...]:
    """The members of a union; the type itself where it is none."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)
