"""`zipage doctor`: what this machine has and lacks, and what to do about it.

Knows nothing of how anything is looked at.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Annotated

import typer

from zipage_lang.commands.findings import Finding, bad, good
from zipage_lang.one_line_errors import one_line_errors

EXIT_MISSING = 1
COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "missing": typer.colors.RED}
PROBE_MODEL = "zipage-tiny-reasoner"  # comes with the package

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    try_it: Annotated[
        bool, typer.Option("--run", help="also start an engine and draw a few tokens")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the findings as JSON")] = False,
) -> None:
    """Check what this machine has and lacks.

    Each line is ok, warn or missing, with what to do. Ends with exit code 1 where something is
    missing that this machine needs.
    """
    from zipage_lang.commands.doctor_card import card_findings
    from zipage_lang.commands.doctor_machine import machine_findings

    with one_line_errors():
        found = []
        looks = itertools.chain(machine_findings(), card_findings(), _run() if try_it else ())
        for finding in looks:
            found.append(finding)
            if not as_json:
                _print(finding)
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
        if any(finding.status == "missing" for finding in found):
            raise typer.Exit(EXIT_MISSING)


def _print(finding: Finding) -> None:
    status = typer.style(f"{finding.status:<7}", fg=COLOURS[finding.status])
    typer.echo(f"{status} {finding.name:<14} {finding.value}")
    if finding.advice:
        typer.echo(f"{'':<23}-> {finding.advice}")


def _run() -> Iterator[Finding]:
    from zipage_lang.commands.starting import started_engine
    from zipage_lang.frontend.errors import ZipageError
    from zipage_lang.runtime.sampling_params import SamplingParams

    try:
        with started_engine(PROBE_MODEL, {"kv_cache_memory": 0.125, "max_running": 1}) as engine:
            sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            output = engine.generate([[1, 2, 3]], sampling)[0]
            ready = engine.ready
    except (ZipageError, ValueError, OSError) as error:
        yield bad("engine", str(error).splitlines()[0], "see the lines above it")
        return
    drawn = f"{len(output.token_ids)} tokens drawn by {ready.architecture} on {ready.backend}"
    yield good("engine", drawn)
