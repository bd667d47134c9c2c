"""The table's columns: what each is called, what it means and how it is written.

Knows nothing of pages or files.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from zipage_lang.evaluation.statistics import Interval
from zipage_lang.evaluation.summary import CellSummary

NOTHING = "-"


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column; `text` of a row is what stands in its cell."""

    title: str
    meaning: str
    text: Callable[[Any], str]
    is_number: bool = True


def columns_for(summaries: Sequence[CellSummary]) -> list[Column]:
    """Those columns that some summary fills; pass@k and majority@k for each k there is."""
    passes = sorted({k for summary in summaries for k in summary.pass_at})
    votes = sorted({k for summary in summaries for k in summary.majority_at})
    columns = [
        *SETTING_COLUMNS,
        *_COUNTS,
        *(_pass_column(k) for k in passes),
        *(_majority_column(k) for k in votes),
        *_RESULTS,
    ]
    return [
        column
        for column in columns
        if not summaries or any(column.text(summary) != NOTHING for summary in summaries)
    ]


def percent(interval: Interval | None) -> str:
    """`93.1 [90.2, 95.5]`, of shares."""
    if interval is None:
        return NOTHING
    value, low, high = (100 * part for part in (interval.value, interval.low, interval.high))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def number(value: float | None, digits: int = 0) -> str:
    """With thousands marked; a dash for None."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _pass_column(k: int) -> Column:
    return Column(
        f"pass@{k}, %",
        f"chance that one of {k} samples is right, with the 95% bootstrap interval over problems",
        lambda summary: percent(summary.pass_at.get(k)),
    )


def _majority_column(k: int) -> Column:
    return Column(
        f"majority@{k}, %",
        f"whether the commonest answer of {k} samples is right",
        lambda summary: percent(summary.majority_at.get(k)),
    )


def _of_setting(name: str) -> Callable[[Any], str]:
    return lambda row: NOTHING if row.is_full else str(getattr(row, name))


def _lengths(summary: CellSummary) -> str:
    length = summary.mean_len
    return f"{length.value:,.0f} [{length.low:,.0f}, {length.high:,.0f}]"


SETTING_COLUMNS = (
    Column("policy", "how kept tokens are chosen", lambda summary: summary.label, False),
    Column("mode", "fixed: when due; adaptive: under pressure", _of_setting("mode"), False),
    Column("protect", "none: the prompt competes too", _of_setting("protect"), False),
    Column("K", "tail tokens kept per layer and head", _of_setting("budget")),
    Column("asked", "the budget as the sweep named it", _of_setting("asked_budget")),
    Column("E", "tail tokens that may pile up on top of K", _of_setting("interval")),
)
_COUNTS = (
    Column("problems", "problems in the cell", lambda summary: str(summary.num_problems)),
    Column("samples", "samples per problem", lambda summary: str(summary.num_samples)),
)
_RESULTS = (
    Column(
        "pass@1 - full, points",
        "paired difference to full KV, problem by problem",
        lambda summary: percent(summary.pass_difference),
    ),
    Column(
        "of full, %",
        "pass@1 over full KV's pass@1",
        lambda summary: percent(summary.pass_ratio),
    ),
    Column("mean length", "output tokens, with the interval of the mean", _lengths),
    Column(
        "length of full's, %",
        "mean length over full KV's",
        lambda summary: percent(summary.len_ratio),
    ),
    Column("p95 length", "output tokens", lambda summary: number(summary.p95_len)),
    Column(
        "solved length",
        "mean output tokens of right samples",
        lambda summary: number(summary.mean_solved_len),
    ),
    Column(
        "cut, %",
        "samples that hit the limit of length",
        lambda summary: number(100 * summary.share_cut, 1),
    ),
    Column(
        "tokens/solved",
        "all output tokens over right samples",
        lambda summary: number(summary.tokens_per_solved),
    ),
    Column("tok/s", "output tokens per second of the whole cell", lambda s: number(s.tok_s)),
    Column(
        "s/solved",
        "seconds of the whole engine per right sample",
        lambda summary: number(summary.s_per_solved, 4),
    ),
    Column("wall s", "seconds the cell took", lambda summary: number(summary.wall_s, 1)),
    Column("peak blocks", "most KV blocks held at once", lambda s: number(s.peak_blocks)),
    Column(
        "resident",
        "most slots a sample held at once, mean over samples",
        lambda summary: number(summary.mean_resident),
    ),
    Column(
        "compactions",
        "per sample",
        lambda summary: number(summary.compactions_per_sample, 1),
    ),
    Column(
        "displaced",
        "requests that lost their place for want of blocks",
        lambda summary: number(summary.num_displaced),
    ),
)
