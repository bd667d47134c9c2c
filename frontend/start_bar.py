"""Shows what a starting engine is at: a line on a terminal's stderr with a bar where it counts.

Knows nothing of engines.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from zipage_lang.runtime.messages import Starting

Report = Callable[[Starting], None]


@contextlib.contextmanager
def start_bar(what: str) -> Iterator[Report]:
    """What to call with each `Starting`, from any thread. Draws on a terminal only.

    The line goes away when a count is complete, comes back with the next stage, and is gone behind
    the block. What is printed meanwhile stands above it.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    line = _Line(what)
    line.show(Starting(stage="starting"))
    try:
        yield line.show
    finally:
        line.hide()


class _Line:
    """The line as it stands now, or none."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def show(self, starting: Starting) -> None:
        if starting.total and starting.done >= starting.total:
            return self.hide()
        with self._lock:
            bar = self._bar = self._bar or _new_bar(self._what)
            bar.update(
                bar.task_ids[0],
                description=f"{self._what}: {starting.stage}",
                completed=starting.done,
                total=starting.total or None,  # None: a pulse
                count=f"{starting.done}/{starting.total}" if starting.total else "",
            )

    def hide(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._bar = None


def _new_bar(what: str) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=None, count="")
    bar.start()
    return bar
