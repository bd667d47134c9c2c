"""Writes docs/reference.md from the commands and the settings themselves.

`python -m zipage_lang.reference > docs/reference.md`; a test holds the file to this.
Knows nothing of what commands or settings do.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zipage_lang.cli import ENTRIES, load
from zipage_lang.commands.flag_groups import ENGINE_GROUPS, SERVER_GROUPS
from zipage_lang.flags import Flag, FlagGroup, default_of, type_text
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

INTRO = """\
# Commands and options

<!-- Made by `python -m zipage_lang.reference`; do not edit. -->

Every option of the engine and of the server is a field of a settings class; flags, this page and
`zipage COMMAND --help` are made from those fields. In Python the fields are keyword arguments:
`zipage.Engine("smollm2-135m", max_running=8)` is `--max-running 8`. `unset` means that the engine
chooses, as the text says.
"""
ENGINE, SERVER = "[engine options](#engine-options)", "[server options](#server-options)"
SHARED = {
    **{group.heading: ENGINE for group in ENGINE_GROUPS},
    **{group.heading: SERVER for group in SERVER_GROUPS},
}
FIELD_CLASSES = (
    ("Sampling fields", SamplingParams, "`zipage.SamplingParams`, keywords of `gen` and of `run`."),
    ("KV fields", KVParams, "`zipage.KV`, and `kv` in a request; unset takes the engine's option."),
    ("Thinking fields", ThinkParams, "`zipage.ThinkParams`, the sampling field `think`."),
)


def reference() -> str:
    """The whole page."""
    parts = [INTRO, "## Commands\n"]
    for name in ENTRIES:
        parts += _command_parts(f"zipage {name}", load(name))
    parts += ["## Engine options\n", *_group_parts(ENGINE_GROUPS)]
    parts += ["## Server options\n", *_group_parts(SERVER_GROUPS)]
    for heading, settings, note in FIELD_CLASSES:
        parts += [f"## {heading}\n", note + "\n", _field_table(settings)]
    return "\n".join(parts)


def _command_parts(name: str, command: Any) -> Iterator[str]:
    subcommands = getattr(command, "commands", None)
    if subcommands is not None:
        for child in subcommands.values():
            child.help = child.help or ""
            yield from _command_parts(f"{name} {child.name}", child)
        return
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join([name, "[OPTIONS]", *map(_argument_word, arguments)])
    yield f"### {name}\n\n```text\n{usage}\n```\n\n{command.help}\n"
    if arguments:
        words = [(f"`{param.name.upper()}`", _plain(param.help)) for param in arguments]
        yield _table(("Argument", "What"), words)
    options = [param for param in command.params if param.param_type_name == "option"]
    own = [param for param in options if param.rich_help_panel not in SHARED]
    rows = [_option_row(param) for param in own if not param.hidden]
    if rows:
        yield _table(("Option", "Value", "Default", "What"), rows)
    shared = {SHARED[param.rich_help_panel]: None for param in options if param not in own}
    if shared:
        yield f"And the {' and the '.join(shared)}.\n"


def _argument_word(param: Any) -> str:
    word = param.name.upper() + ("..." if param.nargs == -1 else "")
    return word if param.required else f"[{word}]"


def _option_row(param: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    kind = "" if param.is_flag else _kind(param.bare_type())
    default = "required" if param.required else _default_text(param.default)
    variable = f" (environment: `{param.envvar}`)" if param.envvar else ""
    return names, kind, default, _plain(param.help) + variable


def _kind(type_name: str) -> str:
    """Typer's name of a type; of a list's items where the option may be repeated."""
    name = type_name.removeprefix("list[").removesuffix("]")
    words = {"int": "whole number", "float": "number", "str": "text", "Path": "path"}
    return words.get(name, name.replace("|", " or "))


def _group_parts(groups: Sequence[FlagGroup]) -> Iterator[str]:
    for group in groups:
        rows = [_flag_row(flag) for flag in group.flags()]
        if len(groups) > 1:
            yield f"### {group.heading}\n"
        yield _table(("Option", "Field", "Value", "Default", "What"), rows)


def _flag_row(flag: Flag) -> tuple[str, ...]:
    names = flag.declaration.split("/")
    variable = f" (environment: `{flag.variable}`)" if flag.variable else ""
    return (
        ", ".join(f"`{name}`" for name in names),
        f"`{flag.name}`",
        type_text(flag.kind),
        _default_text(flag.default),
        _plain(flag.help) + variable,
    )


def _field_table(settings: type[Any]) -> str:
    kinds = typing.get_type_hints(settings)
    rows = [
        (
            f"`{field.name}`",
            type_text(kinds[field.name]),
            _default_text(default_of(field)),
            _plain(str(field.metadata.get("help", ""))),
        )
        for field in dataclasses.fields(settings)
    ]
    return _table(("Field", "Value", "Default", "What"), rows)


def _default_text(value: Any) -> str:
    """A table's cell: nothing for what is unset or empty."""
    if value is None or value in ("", (), []):
        return "unset" if value is None else ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def _plain(text: str | None) -> str:
    """Help as a table's cell."""
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|").replace("None:", "unset:").strip()


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
