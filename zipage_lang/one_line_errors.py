"""Turns what a caller can mend into one line on stderr and exit code 2.

Knows nothing of what the commands do.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from zipage_lang.frontend.errors import ZipageError

EXIT_USER_ERROR = 2


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Around a command: no traceback for bad input, a missing file or an engine that ended."""
    try:
        yield
    except BrokenPipeError:  # the reader has what it wanted, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"zipage: {_file_error(error)}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except (ValueError, ZipageError) as error:
        typer.echo(f"zipage: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error


def _file_error(error: OSError) -> str:
    """`No such file or directory: x.py`, without an error number."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.strerror}: {error.filename}"
