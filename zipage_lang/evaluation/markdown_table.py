"""The page's tables once more, as Markdown for a repository.

Knows nothing of how numbers came to be.
"""

from collections.abc import Mapping, Sequence

from zipage_lang.evaluation.columns import Column, columns_for
from zipage_lang.evaluation.summary import CellSummary


def markdown_of(facts: Mapping[str, str], summaries: Sequence[CellSummary]) -> str:
    """Facts in one line, then a table per task, full KV first."""
    columns = columns_for(summaries)
    listed = "; ".join(f"{name}: {text}" for name, text in facts.items())
    parts = [f"{listed}\n"]
    for task in dict.fromkeys(summary.task for summary in summaries):
        group = [summary for summary in summaries if summary.task == task]
        parts.append(f"### {task}\n\n{_table(group, columns)}")
    return "\n".join(parts)


def _table(summaries: Sequence[CellSummary], columns: Sequence[Column]) -> str:
    rows = [
        [column.title for column in columns],
        ["--:" if column.is_number else "---" for column in columns],
        *([column.text(summary) for column in columns] for summary in summaries),
    ]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
