"""Finds the program in a file and gives it the command line's words as arguments.

Knows nothing of engines or of how a program runs.
"""

import difflib
import importlib.util
import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zipage_lang.program import Program
from zipage_lang.runtime.strict_fields import unknown_name_error

MODULE = "zipage_program"  # not __main__: what a script does when run by itself is not done
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def find_program(target: str) -> Program:
    """The program of `file.py` or `file.py:name`. Runs the file's top level.

    Without a name: the file's only program, or the one named main. Raises ValueError that lists
    what is there.
    """
    file, name = _parted(target)
    programs = _programs_of(_loaded(file))
    if name:
        if name not in programs:
            raise unknown_name_error(f"program of {file}", name, programs or ["none"])
        return programs[name]
    if not programs:
        raise ValueError(
            f"{file} has no program: decorate a function with @zipage.function, or run the file "
            "with python"
        )
    if len(programs) > 1 and "main" not in programs:
        raise ValueError(
            f"{file} has several programs; name one: "
            + ", ".join(f"{file}:{each}" for each in programs)
        )
    return programs.get("main") or next(iter(programs.values()))


def read_arguments(program: Program, words: Sequence[str]) -> dict[str, Any]:
    """`name=value` and values by position, each as its parameter's type. Raises ValueError.

    A word is taken as `name=value` only where the program has a parameter of that name.
    """
    parameters = list(inspect.signature(program).parameters.values())[1:]  # behind the state
    names = [parameter.name for parameter in parameters]
    kinds = _kinds(program)
    values: dict[str, Any] = {}
    by_position = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in names:
            values[name] = _value(name, text, kinds.get(name))
        elif equals and difflib.get_close_matches(name, names, n=1, cutoff=0.7):
            raise unknown_name_error(f"argument of {program!r}", name, names)
        else:
            by_position.append(word)
    free = [name for name in names if name not in values]
    if len(by_position) > len(free):
        raise ValueError(f"{_usage(program, parameters)}; {len(words)} arguments are too many")
    for name, text in zip(free, by_position, strict=False):
        values[name] = _value(name, text, kinds.get(name))
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.name not in values and _is_needed(parameter)
    ]
    if missing:
        raise ValueError(f"{_usage(program, parameters)}; missing: {', '.join(missing)}")
    return values


def _parted(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if colon and name.isidentifier():
        return Path(file), name
    return Path(target), ""


def _loaded(file: Path) -> types.ModuleType:
    """The file as a module; files beside it can be imported from it."""
    if file.suffix != ".py" or not file.is_file():
        is_there = "is no Python file" if file.exists() else "does not exist"
        raise ValueError(f"{file} {is_there}; give a file.py with a @zipage.function in it")
    spec = importlib.util.spec_from_file_location(MODULE, file)
    assert spec is not None, f"no module can be made of {file}"
    assert spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _programs_of(module: types.ModuleType) -> dict[str, Program]:
    """Its own programs, not those it imported."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Program) and value.__module__ == MODULE
    }


def _kinds(program: Program) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(program))
    except (NameError, TypeError):  # annotations that only a type checker can read
        return {}


def _value(name: str, text: str, kind: Any) -> Any:
    """The word as `kind`; a text where the program does not say, or says a text."""
    if kind in (None, str, Any, inspect.Parameter.empty):
        return text
    if kind is bool and text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    try:
        return kind(text) if kind in (int, float) else json.loads(text)
    except ValueError:
        wanted = getattr(kind, "__name__", str(kind)) if kind in (int, float, bool) else "JSON"
        raise ValueError(f"{name}={text!r} must be {wanted}") from None


def _is_needed(parameter: inspect.Parameter) -> bool:
    has_default = parameter.default is not inspect.Parameter.empty
    return not has_default and parameter.kind is not inspect.Parameter.VAR_KEYWORD


def _usage(program: Program, parameters: Sequence[inspect.Parameter]) -> str:
    shown = ", ".join(str(parameter) for parameter in parameters)
    return f"{program!r} takes ({shown})"
