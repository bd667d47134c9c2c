"""Rows of a data file: JSON lines, a JSON list, or parquet.

Knows nothing of what the rows mean.
"""

import importlib
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")


def read_rows(path: Path) -> list[Row]:
    """Every row by column name. Raises ValueError for what can't be read, OSError for no file."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from error
    if path.suffix == ".json":
        return _checked(path, _parsed(path, text))
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return _checked(path, [_parsed(path, line, number) for number, line in lines])


def _parsed(path: Path, text: str, number: int | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        place = path if number is None else f"{path}, line {number}"
        raise ValueError(f"{place}: not JSON ({error})") from error


def _checked(path: Path, rows: Any) -> list[Row]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: each row must be a JSON object")
    return rows


def _parquet_rows(path: Path) -> list[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(
            f"{path}: parquet needs pyarrow; install zipage-lang[eval], or convert it to .jsonl"
        ) from error
    with path.open("rb") as file:
        try:
            table = parquet.read_table(file)
        except (ValueError, OSError) as error:  # pyarrow's errors are kinds of these
            raise ValueError(f"{path}: not a parquet file ({error})") from error
    rows: list[Row] = table.to_pylist()
    return rows
