"""The tables of QUALITY.md, from the sweeps' sweep.json files.

    python benchmarks/quality_tables.py            # prints them
    python benchmarks/quality_tables.py --write    # puts them into QUALITY.md

One table per budget: a row is a policy, a column a task, a cell pass@1 in percent and, where
outputs were over 1.02 times as long as full KV's, how many times. `*`: fewer than 800 samples, but
at least 100; `-`: fewer still. Knows nothing of how sweeps are run.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quality"
DOCUMENT = ROOT / "QUALITY.md"
TASKS = ("trace@1", "recall@1", "countdown@0", "multiply@2")
BUDGETS = ("25%", "12%", "50%", "6%")
POLICIES = (
    "zipage2", "zipage2:lot_share=0.3", "rkv", "rkv:mass_weight=0.5", "gkv", "keydiff", "tiers",
    "zipage", "snapkv", "h2o", "triattention", "kvcompress", "pyramidkv", "vase", "page", "random",
    "streaming",
)  # fmt: skip
WHOLE, LEAST = 800, 100  # samples of a cell
NOTED_GROWTH = 1.02

Cells = dict[tuple[str, str, str], dict[str, Any]]  # by policy, asked budget and task


def read_cells(name: str) -> Cells:
    """A folder's compressed cells that have enough samples."""
    cells = json.loads((RESULTS / name / "sweep.json").read_text())["cells"]
    return {
        (cell["policy"], cell["asked_budget"], cell["task"]): cell
        for cell in cells
        if cell["mode"] != "off" and _num_samples(cell) >= LEAST
    }


def budget_table(cells: Cells, budget: str) -> str:
    """Every policy at one budget."""
    lines = [_head(budget)]
    for name in POLICIES:
        found = (cells.get((name, budget, task)) for task in TASKS)
        lines.append(_line(name, ("-" if cell is None else _text(cell) for cell in found)))
    return "\n".join(lines)


def unprotected_table(main: Cells, unprotected: Cells) -> str:
    """Protected -> evictable at one budget, for the policies that were run so."""
    lines = [_head("25%")]
    for name in POLICIES:
        keys = [(name, "25%", task) for task in TASKS]
        if any(key in unprotected for key in keys):
            lines.append(_line(name, (_change(main.get(k), unprotected.get(k)) for k in keys)))
    return "\n".join(lines)


def _head(budget: str) -> str:
    return f"| K = {budget} | {' | '.join(TASKS)} |\n|---|{'---:|' * len(TASKS)}"


def _line(name: str, texts: Iterable[str]) -> str:
    return f"| `{name}` | {' | '.join(texts)} |"


def _change(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    if before is None or after is None:
        return "-"
    return f"{_percent(before)} -> {_text(after).rstrip('*')}"


def _text(cell: dict[str, Any]) -> str:
    growth = cell["len_ratio"]["value"]
    length = f" (x{growth:.2f})" if growth > NOTED_GROWTH else ""
    return f"{_percent(cell)}{length}{'' if _num_samples(cell) >= WHOLE else '*'}"


def _percent(cell: dict[str, Any]) -> str:
    return f"{100 * cell['pass_at']['1']['value']:.1f}"


def _num_samples(cell: dict[str, Any]) -> int:
    return int(cell["num_problems"] * cell["num_samples"])


def with_tables(text: str) -> str:
    """QUALITY.md with what stands between its marks replaced."""
    main = read_cells("main")
    tables = {
        "main": "\n\n".join(budget_table(main, budget) for budget in BUDGETS),
        "unprotected": unprotected_table(main, read_cells("unprotected")),
    }
    for name, table in tables.items():
        begin, end = f"<!-- tables: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        assert after, f"QUALITY.md has no marks {begin} and {end}"
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def main() -> None:
    text = with_tables(DOCUMENT.read_text())
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
