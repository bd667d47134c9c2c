"""Writes what a folder of runs comes to: JSON, a Markdown table, plots and the page.

Knows nothing of engines; runs are read from their files, so parts of a sweep that ran apart, or on
several machines, come together here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from zipage_lang.evaluation.markdown_table import markdown_of
from zipage_lang.evaluation.png_plots import write_plots
from zipage_lang.evaluation.report import render_report
from zipage_lang.evaluation.run_file import RunData, read_run
from zipage_lang.evaluation.summary import CellSummary, summarise
from zipage_lang.evaluation.sweep import RUNS_FOLDER

SWEEP_FILE = "sweep.json"
REPORT_FILE = "report.html"
TABLE_FILE = "table.md"


class SweepResults(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `sweep.json`."""

    facts: dict[str, str]  # about model, sampling and machine
    cells: list[CellSummary]


def write_results(folder: Path, facts: Mapping[str, str]) -> SweepResults:
    """Sum up all runs of the folder. facts: shown beside those that the runs' headers hold.

    Raises ValueError where there is no run, a file is none, or matplotlib is missing.
    """
    runs = [read_run(path) for path in sorted((folder / RUNS_FOLDER).glob("*.jsonl"))]
    cells = summarise(runs)
    if not cells:
        raise ValueError(f"{folder / RUNS_FOLDER} has no results yet")
    results = SweepResults(facts={**_facts(runs), **facts}, cells=cells)
    text = msgspec.json.format(msgspec.json.encode(results), indent=1)
    (folder / SWEEP_FILE).write_bytes(text + b"\n")
    page = render_report("Accuracy under compression", results.facts, cells)
    (folder / REPORT_FILE).write_text(page, encoding="utf-8")
    table = markdown_of(results.facts, cells)
    (folder / TABLE_FILE).write_text(table, encoding="utf-8")
    write_plots(folder, cells)
    return results


def read_facts(folder: Path) -> dict[str, str]:
    """Facts of an earlier `write_results`; empty where there was none."""
    path = folder / SWEEP_FILE
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=SweepResults).facts


def _facts(runs: list[RunData]) -> dict[str, str]:
    """What the headers say of model and sampling; several values where runs differ."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for name, value in run.header.sampling.items():
            text = _as_text(name, value)
            known = values.setdefault(name.replace("_", " "), [])
            if text not in known:
                known.append(text)
    return {name: ", ".join(found) for name, found in values.items()}


def _as_text(name: str, value: Any) -> str:
    if value is None:
        return "what the context leaves" if name == "max_tokens" else "none"
    return str(value)
