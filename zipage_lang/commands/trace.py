"""`zipage trace`: a page of what programs did.

Knows nothing of how a trace is read or drawn.
"""

from pathlib import Path
from typing import Annotated

import typer

from zipage_lang.one_line_errors import one_line_errors

app = typer.Typer(add_completion=False)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="what run(trace=...) or ZIPAGE_TRACE wrote")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page; else FILE with .html")
    ] = None,
    last: Annotated[int | None, typer.Option(help="only so many of the last runs", min=1)] = None,
) -> None:
    """Make an HTML page of a trace file.

    The page is self-contained: one file, no outside requests. Prints where it lies.
    """
    from zipage_lang.trace_page import make_page

    with one_line_errors():
        page, notes = make_page(file, out or file.with_suffix(".html"), last)
        for note in notes:
            typer.echo(f"zipage: {file}: {note}", err=True)
        typer.echo(page)
