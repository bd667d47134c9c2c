"""One self-contained HTML page of a sweep: plots and a table with every number, task by task.

No scripts, nothing from outside. Knows nothing of how numbers came to be.
"""

import html
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any

from zipage_lang.evaluation.chart_data import Panel, budget_panels, labels_of, throughput_panel
from zipage_lang.evaluation.columns import Column, columns_for
from zipage_lang.evaluation.summary import CellSummary
from zipage_lang.evaluation.svg_chart import svg_of, swatch_of

_TITLE, _BODY = "<!--title-->", "<!--body-->"
_READING = (
    "Points are pass@1 with 95% bootstrap intervals over problems; where every problem ends alike "
    "the interval has no width, though the truth may differ. The dotted line and band are full KV. "
    "Squares and hanging triangles: adaptive mode. Hollow marks: the prompt is not protected."
)


def render_report(title: str, facts: Mapping[str, str], summaries: Sequence[CellSummary]) -> str:
    """The page of a sweep. facts: what holds for all cells, shown as they stand."""
    return render_page(title, facts, _sections(summaries))


def render_page(title: str, facts: Mapping[str, str], content: str) -> str:
    """A page with a title, facts, and content that is HTML already."""
    package = importlib.resources.files("zipage_lang.evaluation")
    template = package.joinpath("report_template.html").read_text("utf-8")
    before, _, after = template.partition(_BODY)
    head = before.replace(_TITLE, html.escape(title))
    return f"{head}<h1>{html.escape(title)}</h1>{_listed(facts)}{content}{after}"


def table_of(rows: Sequence[Any], columns: Sequence[Column]) -> str:
    """A table that scrolls sideways where it is too wide; full KV's rows stand out."""
    head = "".join(
        f'<th scope="col"{_align(column)} title="{html.escape(column.meaning, quote=True)}">'
        f"{html.escape(column.title)}</th>"
        for column in columns
    )
    lines = "".join(_row_of(row, columns) for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _sections(summaries: Sequence[CellSummary]) -> str:
    tasks: dict[str, list[CellSummary]] = {}
    for summary in summaries:
        tasks.setdefault(summary.task, []).append(summary)
    labels, columns = labels_of(summaries), columns_for(summaries)
    links = "".join(
        f'<a href="#task-{index}">{html.escape(task)}</a>' for index, task in enumerate(tasks)
    )
    sections = [
        _section(index, task, group, labels, columns)
        for index, (task, group) in enumerate(tasks.items())
    ]
    reading = f'<p class="muted">{html.escape(_READING)}</p>'
    return f"<nav>{links}</nav>{reading}{''.join(sections)}{_meanings(columns)}"


def _section(
    index: int,
    task: str,
    summaries: Sequence[CellSummary],
    labels: Sequence[str],
    columns: Sequence[Column],
) -> str:
    shown = labels_of(summaries)
    legend = "".join(f"<li>{swatch_of(label, labels)}{html.escape(label)}</li>" for label in shown)
    panels = [("Accuracy against budget", panel) for panel in budget_panels(summaries)]
    throughput = throughput_panel(summaries)
    if throughput is not None:
        panels.append(("Accuracy against throughput", throughput))
    figures = "".join(_figure(heading, panel, labels) for heading, panel in panels)
    return (
        f'<section><h2 id="task-{index}">{html.escape(task)}</h2><ul class="legend">{legend}</ul>'
        f'<div class="charts">{figures}</div>{table_of(summaries, columns)}</section>'
    )


def _figure(heading: str, panel: Panel, labels: Sequence[str]) -> str:
    text = html.escape(f"{heading}: {panel.title}")
    return f"<figure><h3>{text}</h3>{svg_of(panel, labels)}</figure>"


def _row_of(row: Any, columns: Sequence[Column]) -> str:
    cells = "".join(
        f"<td{_align(column)}>{html.escape(column.text(row))}</td>" for column in columns
    )
    return f"<tr{' class=baseline' if row.is_full else ''}>{cells}</tr>"


def _align(column: Column) -> str:
    return " class=number" if column.is_number else ""


def _meanings(columns: Sequence[Column]) -> str:
    listed = _listed({column.title: column.meaning for column in columns})
    return f"<details><summary>What the columns mean</summary>{listed}</details>"


def _listed(texts: Mapping[str, str]) -> str:
    items = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in texts.items()
    )
    return f"<dl>{items}</dl>"
