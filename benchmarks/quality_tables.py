"""The tables of QUALITY.md from the sweeps' sweep.json files.

    python benchmarks/quality_tables.py benchmarks/results/quality/main [more folders]

A row is a policy, a column a budget of one task; cells are pass@1 with the half-width of its 95%
interval, and the mean length over full KV's. Knows nothing of how sweeps are run.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def read_cells(folder: Path) -> list[Cell]:
    cells: list[Cell] = json.loads((folder / "sweep.json").read_text())["cells"]
    return cells


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    found, ratio = cell["pass_at"]["1"], cell["len_ratio"]
    width = 50 * (found["high"] - found["low"])
    length = "" if ratio is None else f", x{ratio['value']:.2f}"
    is_whole = cell["num_problems"] * cell["num_samples"] >= 400
    return f"{100 * found['value']:.1f} ± {width:.1f}{length}{'' if is_whole else ' *'}"


def table(cells: Sequence[Cell], task: str) -> list[str]:
    """Lines of one task's table."""
    own = [cell for cell in cells if cell["task"] == task and cell["mode"] != "off"]
    columns = sorted({(c["asked_budget"], c["interval"]) for c in own}, key=_column_order)
    names = sorted({cell["policy"] for cell in own})
    heads = [f"{budget}, E={interval}" for budget, interval in columns]
    lines = [f"| {task} | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name in names:
        by_column = {(c["asked_budget"], c["interval"]): c for c in own if c["policy"] == name}
        lines.append(
            f"| `{name}` | " + " | ".join(cell_text(by_column.get(c)) for c in columns) + " |"
        )
    return lines


def _column_order(column: tuple[str, int]) -> tuple[float, int]:
    return float(column[0].rstrip("%")), column[1]


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        cells = read_cells(folder)
        print(f"### {folder.name}\n")
        for task in dict.fromkeys(cell["task"] for cell in cells):
            print("\n".join(table(cells, task)) + "\n")


if __name__ == "__main__":
    main()
