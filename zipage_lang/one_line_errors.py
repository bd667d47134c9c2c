"""Turns what a caller can mend into one line on stderr and exit code 2.

Knows nothing of what the commands do.
"""

import contextlib
from collections.abc import Iterator

import typer

from zipage_lang.frontend.errors import ZipageError

EXIT_USER_ERROR = 2


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Around a command: no traceback for bad input, a missing file or an engine that ended."""
    try:
        yield
    except (ValueError, OSError, ZipageError) as error:
        typer.echo(f"zipage: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
