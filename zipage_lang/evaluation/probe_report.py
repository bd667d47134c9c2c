"""Results of a probe (perplexity, needle): JSON and one page with a table.

Knows nothing of engines or of what a figure means.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from zipage_lang.evaluation.columns import NOTHING, SETTING_COLUMNS, Column
from zipage_lang.evaluation.grid import Setting
from zipage_lang.evaluation.report import render_page, table_of
from zipage_lang.evaluation.statistics import Interval


class ProbeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one setting."""

    mode: str
    policy: str
    budget: int
    asked_budget: str
    interval: int
    protect: str
    label: str
    is_full: bool
    figures: dict[str, Interval]


def summary_of(setting: Setting, figures: Mapping[str, Interval]) -> ProbeSummary:
    """A setting's row."""
    return ProbeSummary(
        mode=setting.mode,
        policy=setting.policy,
        budget=setting.budget,
        asked_budget=setting.asked_budget,
        interval=setting.interval,
        protect=setting.protect,
        label="full" if setting.is_full else setting.policy,
        is_full=setting.is_full,
        figures=dict(figures),
    )


def write_probe(
    folder: Path, name: str, title: str, facts: Mapping[str, str], rows: Sequence[ProbeSummary]
) -> list[Path]:
    """`NAME.json` and `NAME.html` in the folder; returns both."""
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode({"facts": dict(facts), "settings": list(rows)})
    json_path, page_path = folder / f"{name}.json", folder / f"{name}.html"
    json_path.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    page = render_page(title, facts, table_of(rows, probe_columns(rows)))
    page_path.write_text(page, encoding="utf-8")
    return [json_path, page_path]


def probe_columns(rows: Sequence[ProbeSummary]) -> list[Column]:
    """The setting, then every figure."""
    names = dict.fromkeys(name for row in rows for name in row.figures)
    return [*SETTING_COLUMNS, *(_figure_column(name) for name in names)]


def _figure_column(name: str) -> Column:
    return Column(name, name, lambda row: interval_text(row.figures.get(name)))


def interval_text(interval: Interval | None) -> str:
    """`1.203 [1.100, 1.310]`."""
    if interval is None:
        return NOTHING
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
