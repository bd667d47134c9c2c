"""`zipage run`: a program file with an engine, or a server, behind it.

Knows nothing of how the program is found or run.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zipage_lang.commands.completions import model_names
from zipage_lang.commands.flag_groups import ENGINE_GROUPS, program_groups
from zipage_lang.flags import takes_flags
from zipage_lang.frontend.errors import ZipageError
from zipage_lang.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from zipage_lang.program_state import ProgramState

EXIT_PROGRAM_ERROR = 1

app = typer.Typer(add_completion=False)


@app.command()
@takes_flags(sampling=program_groups(), engine=ENGINE_GROUPS)
def run(
    program: Annotated[str, typer.Argument(help="file.py, or file.py:name where it has several")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="the program's own: values in order, or name=value"),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="known name, folder, GGUF file or hub id",
            autocompletion=model_names,
        ),
    ] = "smollm2-135m",
    url: Annotated[
        str | None, typer.Option(help="run on this Zipage server instead of an engine")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="for the server", envvar="ZIPAGE_API_KEY")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="makes sampled outputs repeatable")] = None,
    trace: Annotated[Path | None, typer.Option(help="write what the run does to this file")] = None,
    show: Annotated[
        bool, typer.Option("--text", help="print the whole text instead of the result")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print result and variables as JSON")
    ] = False,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Run a program file of the language.

    Prints what the program returns, or its variables where it returns nothing. Words behind
    the file are the program's own; behind -- they may begin with dashes.
    """
    with one_line_errors():
        from zipage_lang.commands.program_file import find_program, read_arguments

        with _program_errors():
            found = find_program(program)
        values = read_arguments(found, arguments or [])
        with _backend(model, engine, url, api_key) as backend:
            with _program_errors():
                state = found.run(
                    **values, backend=backend, seed=seed, trace=_text(trace), **sampling
                )
                result = state.ret_value
                error = state.error()
            if error is not None:
                raise error if isinstance(error, (ZipageError, ValueError)) else ValueError(error)
            typer.echo(_shown(state, result, show=show, as_json=as_json))


@contextlib.contextmanager
def _backend(
    model: str, options: dict[str, Any], url: str | None, api_key: str | None
) -> Iterator[Any]:
    if url is not None:
        from zipage_lang.server_backend import ServerBackend

        yield ServerBackend(url, api_key=api_key)
        return
    from zipage_lang.commands.starting import started_engine

    with started_engine(model, options) as engine:
        yield engine


@contextlib.contextmanager
def _program_errors() -> Iterator[None]:
    """What the user's own code raises is shown from their first line on, as Python would."""
    try:
        yield
    except (ValueError, OSError, ZipageError) as error:
        if not _is_users(error):
            raise
        _print_from_users_line(error)
        raise typer.Exit(EXIT_PROGRAM_ERROR) from error
    except Exception as error:
        _print_from_users_line(error)
        raise typer.Exit(EXIT_PROGRAM_ERROR) from error


def _is_users(error: BaseException) -> bool:
    """Whether the user's own code raised it, rather than what it called of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).resolve().parent.parent)
    return bool(frames) and not frames[-1].filename.startswith((ours, "<frozen"))


def _print_from_users_line(error: BaseException) -> None:
    """The traceback without the frames of this command that led to the user's code."""
    from zipage_lang.commands.program_file import MODULE

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != MODULE:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace, file=sys.stderr)


def _shown(state: "ProgramState", result: Any, *, show: bool, as_json: bool) -> str:
    if show:
        return state.text()
    variables = {name: state[name] for name in state.core.variables.own_names}
    if as_json:
        told = {"result": result, "variables": variables}
        return json.dumps(told, ensure_ascii=False, indent=2, default=str)
    if result is not None:
        return str(result)
    if not variables:
        return state.text()
    return "\n".join(f"{name}: {value}" for name, value in variables.items())


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
