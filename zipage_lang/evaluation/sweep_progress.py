"""Shows how far a sweep has come: a bar on a terminal, a line now and then elsewhere.

Knows nothing of engines, files or what is counted.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as RemainingColumn

LINE_EVERY_S = 20.0  # where there is no terminal


class SweepProgress:
    """A context manager; begin a cell, count its samples."""

    def __init__(self, console: Console | None = None) -> None:
        """console: stderr by default."""
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[right]}"),
            TextColumn("{task.fields[rate]:,.0f} tok/s"),
            TimeElapsedColumn(),
            RemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, right="", rate=0.0)
        self._name = ""
        self._num_wanted = self._num_done = self._num_judged = self._num_correct = 0
        self._num_tokens = self._first_tokens = 0
        self._began = self._told = time.perf_counter()

    def begin(self, name: str, num_samples: int) -> None:
        """A cell, or several at once, of which so many samples are still wanted."""
        self._name, self._num_wanted = name, num_samples
        self._num_done = self._num_judged = self._num_correct = 0
        self._first_tokens = self._num_tokens
        self._began = time.perf_counter()
        if num_samples == 0:
            self._console.print(f"{name}: finished before", highlight=False)
        self._bar.reset(self._task, description=name, total=num_samples, right="", rate=0.0)

    def count(self, is_correct: bool | None) -> None:
        """One sample is done; None: right and wrong mean nothing for it."""
        self._num_done += 1
        self._num_judged += is_correct is not None
        self._num_correct += bool(is_correct)
        self._show()
        if self._num_done == self._num_wanted:
            self._console.print(self._line(), highlight=False)

    def note_tokens(self, num_tokens: int) -> None:
        """Tokens drawn since the sweep began."""
        self._num_tokens = num_tokens
        if not self._console.is_terminal and time.perf_counter() - self._told > LINE_EVERY_S:
            self._told = time.perf_counter()
            self._console.print(self._line(), highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def _show(self) -> None:
        self._bar.update(
            self._task, completed=self._num_done, right=self._right(), rate=self._rate()
        )

    def _line(self) -> str:
        return (
            f"{self._name}: {self._num_done}/{self._num_wanted}, {self._right()}"
            f"{self._rate():,.0f} tok/s"
        )

    def _right(self) -> str:
        if not self._num_judged:
            return ""
        return f"{100 * self._num_correct / self._num_judged:.1f}% right, "

    def _rate(self) -> float:
        elapsed_s = time.perf_counter() - self._began
        return (self._num_tokens - self._first_tokens) / elapsed_s if elapsed_s else 0.0
