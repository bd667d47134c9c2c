"""`zipage version`. Knows nothing of anything else."""

import importlib.metadata

import typer

app = typer.Typer(add_completion=False)


@app.command()
def version() -> None:
    """Print the installed version."""
    typer.echo(installed_version())


def installed_version() -> str:
    """Of the package, as it was installed."""
    return importlib.metadata.version("zipage-lang")
