"""Waits for programs that run side by side and keeps every result, whatever one of them does.

Knows nothing of programs' bodies, states or engines.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zipage_lang.errors import BatchError

T = TypeVar("T")


def collect(
    futures: "Sequence[Future[T]]",
    *,
    progress_bar: bool,
    return_exceptions: bool,
    cancel_all: Callable[[], object],
) -> list[T]:
    """The results of all runs, in their order, once the last one is done.

    Raises BatchError where some raised, unless `return_exceptions`. An interrupt calls
    `cancel_all`.
    """
    try:
        _watch(futures, progress_bar)
    except BaseException:
        cancel_all()
        raise
    return _results(futures, return_exceptions)


def _watch(futures: Sequence["Future[T]"], progress_bar: bool) -> None:
    columns = (TextColumn("programs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not progress_bar) as progress:
        task = progress.add_task("programs", total=len(futures))
        for _ in as_completed(futures):
            progress.advance(task)


def _results(futures: Sequence["Future[T]"], return_exceptions: bool) -> list[T]:
    errors = [future.exception() for future in futures]
    results = [
        future.result() if error is None else error
        for future, error in zip(futures, errors, strict=True)
    ]
    first = next((error for error in errors if error is not None), None)
    if first is not None and not return_exceptions:
        raise BatchError(results) from first
    return results  # type: ignore[return-value]  # exceptions only where the caller asked for them
