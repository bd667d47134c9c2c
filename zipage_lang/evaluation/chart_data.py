"""What the plots show: panels of series of points with intervals.

Knows nothing of how a plot is drawn.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from zipage_lang.evaluation.statistics import Interval
from zipage_lang.evaluation.summary import CellSummary


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """x: tokens or tokens per second; y: a share."""

    x: float
    y: Interval
    about: str
    is_adaptive: bool = False
    is_unprotected: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One policy's points, by x."""

    label: str
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One plot. `full` is full KV's point, where there is one."""

    title: str
    x_title: str
    series: tuple[Series, ...]
    full: Point | None
    is_log: bool  # in x
    has_lines: bool


Mark = Literal["circle", "square", "up", "down"]
NUM_COLOURS = 8  # of the palettes; policies beyond it share colours and differ in mark and dashes


def mark_of(place: int, point: Point) -> Mark:
    """What marks a point of the policy at `place` in the report's order."""
    if place < NUM_COLOURS:
        return "square" if point.is_adaptive else "circle"
    return "down" if point.is_adaptive else "up"


def labels_of(summaries: Sequence[CellSummary]) -> list[str]:
    """Every policy of a report, in the order that fixes its colour."""
    return sorted({summary.label for summary in summaries if not summary.is_full})


def budget_panels(summaries: Sequence[CellSummary]) -> list[Panel]:
    """Accuracy against budget, of one task: a panel per mode, protection and interval."""
    full = next((summary for summary in summaries if summary.is_full), None)
    groups: dict[tuple[str, str, int], list[CellSummary]] = {}
    for summary in summaries:
        if not summary.is_full:
            key = (summary.mode, summary.protect, summary.interval)
            groups.setdefault(key, []).append(summary)
    return [
        Panel(
            title=f"{mode}, {_protection(protect)}, E={interval}",
            x_title="budget K, tokens",
            series=_series(group, [float(summary.budget) for summary in group]),
            full=None if full is None else _point(full, 0.0),
            is_log=True,
            has_lines=True,
        )
        for (mode, protect, interval), group in sorted(groups.items())
    ]


def throughput_panel(summaries: Sequence[CellSummary]) -> Panel | None:
    """Accuracy against tokens per second, of one task; None where no cell had the engine alone."""
    timed = [summary for summary in summaries if summary.tok_s is not None]
    full = next((summary for summary in timed if summary.is_full), None)
    others = [summary for summary in timed if not summary.is_full]
    if not timed:
        return None
    return Panel(
        title="all settings",
        x_title="output tokens per second",
        series=_series(others, [summary.tok_s or 0.0 for summary in others]),
        full=None if full is None else _point(full, full.tok_s or 0.0),
        is_log=False,
        has_lines=False,
    )


def _protection(protect: str) -> str:
    return "prompt protected" if protect == "prompt" else "prompt not protected"


def _series(summaries: Sequence[CellSummary], xs: Sequence[float]) -> tuple[Series, ...]:
    points: dict[str, list[Point]] = {}
    for summary, x in zip(summaries, xs, strict=True):
        points.setdefault(summary.label, []).append(_point(summary, x))
    return tuple(
        Series(label, tuple(sorted(found, key=lambda point: point.x)))
        for label, found in sorted(points.items())
    )


def _point(summary: CellSummary, x: float) -> Point:
    value = summary.pass_at[1]
    where = "" if summary.is_full else f" K={summary.budget} E={summary.interval}"
    settings = "" if summary.is_full else f" {summary.mode}, protect {summary.protect}"
    speed = "" if summary.tok_s is None else f", {summary.tok_s:,.0f} tok/s"
    return Point(
        x=x,
        y=value,
        about=(
            f"{summary.label}{where}{settings}: {100 * value.value:.1f}% "
            f"[{100 * value.low:.1f}, {100 * value.high:.1f}]{speed}"
        ),
        is_adaptive=summary.mode == "adaptive",
        is_unprotected=summary.protect == "none",
    )
