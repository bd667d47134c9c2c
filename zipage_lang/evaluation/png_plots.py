"""The same plots as PNG files, by matplotlib.

Knows nothing of how numbers came to be.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zipage_lang.evaluation.chart_data import (
    NUM_COLOURS,
    Panel,
    Point,
    Series,
    budget_panels,
    labels_of,
    mark_of,
    throughput_panel,
)
from zipage_lang.evaluation.summary import CellSummary

COLOURS = (
    "#2458c5",
    "#c2410c",
    "#0b7d74",
    "#9c27a8",
    "#4d7c0f",
    "#be123c",
    "#0369a1",
    "#92610a",
)
STYLES = ("-", "--", ":")
MARKS = {"circle": "o", "square": "s", "up": "^", "down": "v"}
MAX_COLUMNS = 3
PANEL_INCHES = (4.6, 3.6)
LEGEND_COLUMNS, LEGEND_INCHES = 6, 8.4  # a figure is at least as wide as its legend


def write_plots(folder: Path, summaries: Sequence[CellSummary]) -> list[Path]:
    """Two files per task; returns those written. Raises ValueError where matplotlib is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError("plots need matplotlib; install zipage-lang[eval]") from error
    labels, written = labels_of(summaries), []
    for task in dict.fromkeys(summary.task for summary in summaries):
        group = [summary for summary in summaries if summary.task == task]
        throughput = throughput_panel(group)
        for kind, panels in (
            ("budget", budget_panels(group)),
            ("throughput", [throughput] if throughput is not None else []),
        ):
            if panels:
                path = folder / f"accuracy_by_{kind}--{task}.png".replace("/", "_")
                _draw(path, f"{task}: pass@1 against {kind}", panels, labels)
                written.append(path)
    return written


def _draw(path: Path, title: str, panels: Sequence[Panel], labels: Sequence[str]) -> None:
    figure_module = importlib.import_module("matplotlib.figure")
    num_columns = min(MAX_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    width = max(LEGEND_INCHES, num_columns * PANEL_INCHES[0])
    size = (width, num_rows * PANEL_INCHES[1] + 0.8)
    figure = figure_module.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, labels)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title)
    figure.legend(
        handles=_legend(panels, labels),
        loc="outside lower center",
        ncols=LEGEND_COLUMNS,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def _legend(panels: Sequence[Panel], labels: Sequence[str]) -> list[Any]:
    """Full KV's line, a line with its mark per policy that is drawn, then the kinds of marks."""
    line = importlib.import_module("matplotlib.lines").Line2D
    handles = [line([], [], color="0.1", linestyle=":", label="full")]
    drawn = {series.label: series.points[0] for panel in panels for series in panel.series}
    for label in sorted(drawn):
        place = labels.index(label)
        point = dataclasses.replace(drawn[label], is_adaptive=False)
        colour, style = _colour_and_style(place)
        mark = MARKS[mark_of(place, point)]
        handles.append(line([], [], color=colour, linestyle=style, marker=mark, label=label))
    return handles + _kind_legend(panels, line)


def _kind_legend(panels: Sequence[Panel], line: Any) -> list[Any]:
    """What a mark's form and filling say, where one panel holds both kinds."""
    points = [point for panel in panels for series in panel.series for point in series.points]
    handles = []
    if len({point.is_adaptive for point in points}) > 1:
        for name, is_adaptive in (("fixed", False), ("adaptive", True)):
            mark = MARKS[mark_of(0, dataclasses.replace(points[0], is_adaptive=is_adaptive))]
            handles.append(line([], [], color="0.5", linestyle="", marker=mark, label=name))
    if len({point.is_unprotected for point in points}) > 1:
        form: dict[str, Any] = {"linestyle": "", "marker": "o", "color": "0.5"}
        handles.append(line([], [], markerfacecolor="white", label="prompt evictable", **form))
    return handles


def _colour_and_style(place: int) -> tuple[str, str]:
    return COLOURS[place % NUM_COLOURS], STYLES[place // NUM_COLOURS % len(STYLES)]


def _draw_panel(axis: Any, panel: Panel, labels: Sequence[str]) -> None:
    if panel.full is not None:
        y = panel.full.y
        axis.axhspan(100 * y.low, 100 * y.high, color="0.5", alpha=0.18, linewidth=0)
        axis.axhline(100 * y.value, color="0.1", linestyle=":", linewidth=1.2)
        if not panel.is_log:
            axis.plot(panel.full.x, 100 * y.value, "D", color="0.1", markersize=6)
    for series in panel.series:
        _draw_series(axis, series, labels.index(series.label), panel.has_lines)
    if panel.is_log:
        _log_ticks(axis, sorted({point.x for series in panel.series for point in series.points}))
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(panel.x_title, fontsize=8)
    axis.set_ylabel("pass@1, %", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(visible=True, axis="y", color="0.9")


def _log_ticks(axis: Any, budgets: Sequence[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(budgets, [f"{budget:,.0f}" for budget in budgets])
    axis.minorticks_off()


def _draw_series(axis: Any, series: Series, place: int, has_lines: bool) -> None:
    colour, style = _colour_and_style(place)
    if has_lines:
        axis.plot(
            [point.x for point in series.points],
            [100 * point.y.value for point in series.points],
            color=colour,
            linestyle=style,
            linewidth=1.4,
        )
    kinds: dict[tuple[bool, bool], list[Point]] = {}
    for point in series.points:
        kinds.setdefault((point.is_adaptive, point.is_unprotected), []).append(point)
    for points in kinds.values():
        _draw_points(axis, points, colour, MARKS[mark_of(place, points[0])])


def _draw_points(axis: Any, points: Sequence[Point], colour: str, mark: str) -> None:
    """Points that look alike."""
    values = [100 * point.y.value for point in points]
    pairs = list(zip(points, values, strict=True))
    axis.errorbar(
        [point.x for point in points],
        values,
        # A resampled bound may lie past the value itself by rounding.
        yerr=[
            [max(0.0, value - 100 * point.y.low) for point, value in pairs],
            [max(0.0, 100 * point.y.high - value) for point, value in pairs],
        ],
        fmt=mark,
        color=colour,
        markerfacecolor="white" if points[0].is_unprotected else colour,
        markersize=4.5,
        elinewidth=0.8,
    )
