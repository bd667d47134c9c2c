"""Draws a panel as SVG that takes its colours from the page, so that it reads in light and dark.

Knows nothing of what the points stand for.
"""

import html
from collections.abc import Sequence

from zipage_lang.evaluation.axes import Axis, even_ticks, padded, share_bounds
from zipage_lang.evaluation.chart_data import NUM_COLOURS, Panel, Point, Series, mark_of
from zipage_lang.evaluation.statistics import Interval

WIDTH, HEIGHT = 370, 270
LEFT, RIGHT, TOP, BOTTOM = 40, 22, 12, 42
DASHES = ("", "6 3", "2 3")
MAX_X_TICKS = 8
_PLAIN_POINT = Point(0.0, Interval(0.0, 0.0, 0.0), "")
_SHAPES = {
    "circle": "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "square": "M-3.3 -3.3h6.6v6.6h-6.6z",
    "up": "M0 -4.4L4.2 3.1H-4.2z",
    "down": "M0 4.4L4.2 -3.1H-4.2z",
}


def svg_of(panel: Panel, labels: Sequence[str]) -> str:
    """The whole `<svg>`; a series' colour is its label's place in `labels`."""
    points = [point for series in panel.series for point in series.points]
    all_points = [*points, *([panel.full] if panel.full else [])]
    low, high = share_bounds([p.y.low for p in all_points], [p.y.high for p in all_points])
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP)
    xs = [point.x for point in (points if panel.is_log else all_points)]
    x_axis = Axis(*padded(xs, panel.is_log), LEFT, WIDTH - RIGHT, panel.is_log)
    parts = [
        _frame(panel, x_axis, y_axis, sorted(set(xs))),
        *(_full_line(panel, y_axis)),
        *(_series(series, labels, panel.has_lines, x_axis, y_axis) for series in panel.series),
        *(_full_point(panel, x_axis, y_axis)),
    ]
    title = html.escape(f"pass@1 against {panel.x_title}: {panel.title}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        + "".join(parts)
        + "</svg>"
    )


def swatch_of(label: str, labels: Sequence[str]) -> str:
    """The line and mark that stand beside a label in the legend."""
    mark = _mark(_PLAIN_POINT, 14, 6, label, labels)
    return (
        f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">'
        f'<line x1="1" y1="6" x2="27" y2="6" {_stroke(label, labels)}/>{mark}</svg>'
    )


def _frame(panel: Panel, x_axis: Axis, y_axis: Axis, xs: Sequence[float]) -> str:
    parts = []
    for value in even_ticks(y_axis.low, y_axis.high, 5):
        y = y_axis.at(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, f"{100 * value:.0f}%", "end"))
    for value in _x_ticks(panel, x_axis, xs):
        x = x_axis.at(value)
        bottom = HEIGHT - BOTTOM
        parts.append(
            f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        )
        parts.append(_text(x, bottom + 16, f"{value:,.0f}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, panel.x_title, "middle"))
    return "".join(parts)


def _x_ticks(panel: Panel, axis: Axis, xs: Sequence[float]) -> list[float]:
    """The budgets themselves, as far as their numbers do not run into each other."""
    if not panel.is_log:
        return even_ticks(axis.low, axis.high, 4)
    shown: list[float] = []
    for value in xs:
        if not shown or axis.at(value) - axis.at(shown[-1]) > 34:
            shown.append(value)
    return shown[:MAX_X_TICKS]


def _series(
    series: Series, labels: Sequence[str], has_lines: bool, x_axis: Axis, y_axis: Axis
) -> str:
    places = [(x_axis.at(point.x), y_axis.at(point.y.value)) for point in series.points]
    parts = []
    if has_lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" {_stroke(series.label, labels)}/>')
    for point, (x, y) in zip(series.points, places, strict=True):
        parts.append(_whisker(point, x, y_axis, _colour(series.label, labels)))
        parts.append(_mark(point, x, y, series.label, labels))
    return "".join(parts)


def _whisker(point: Point, x: float, y_axis: Axis, colour: str) -> str:
    low, high = y_axis.at(point.y.low), y_axis.at(point.y.high)
    return (
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
        f'stroke="{colour}"/>'
    )


def _mark(point: Point, x: float, y: float, label: str, labels: Sequence[str]) -> str:
    """Hollow where the prompt is not protected."""
    colour = _colour(label, labels)
    fill = "var(--panel)" if point.is_unprotected else colour
    shape = _SHAPES[mark_of(labels.index(label), point)]
    title = f"<title>{html.escape(point.about)}</title>"
    return (
        f'<path d="{shape}" transform="translate({x:.1f} {y:.1f})" fill="{fill}" '
        f'stroke="{colour}" stroke-width="1.5">{title}</path>'
    )


def _full_line(panel: Panel, y_axis: Axis) -> list[str]:
    if panel.full is None:
        return []
    top, bottom = y_axis.at(panel.full.y.high), y_axis.at(panel.full.y.low)
    y, width = y_axis.at(panel.full.y.value), WIDTH - RIGHT - LEFT
    return [
        f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{width}" '
        f'height="{bottom - top:.1f}"/>',
        f'<line class="full" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}">'
        f"<title>{html.escape(panel.full.about)}</title></line>",
    ]


def _full_point(panel: Panel, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Where full KV has a place in x, a diamond."""
    if panel.full is None or panel.is_log:
        return []
    x, y = x_axis.at(panel.full.x), y_axis.at(panel.full.y.value)
    corners = f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}"
    return [
        f'<polygon class="diamond" points="{corners}"><title>{html.escape(panel.full.about)}'
        "</title></polygon>"
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _colour(label: str, labels: Sequence[str]) -> str:
    return f"var(--series-{labels.index(label) % NUM_COLOURS})"


def _stroke(label: str, labels: Sequence[str]) -> str:
    dashes = DASHES[labels.index(label) // NUM_COLOURS % len(DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'stroke="{_colour(label, labels)}" stroke-width="2"{dashed}'
