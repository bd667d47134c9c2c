"""Shows a long build: a bar on stderr where that is a terminal, log lines elsewhere.

Knows nothing of what is built; progress is the libraries and objects that are there so far.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.2
LINE_EVERY_S = 10.0  # between log lines
COUNT_EVERY_S = 1.0  # between counts for whoever waits for the start

_LOG = logging.getLogger(__name__)
_START = logging.getLogger("zipage.start")  # heard by whoever waits for an engine to start


@contextmanager
def shown_build(what: str, note: str, folder: Path, num_files: int) -> Iterator[None]:
    """Tell of a build while it runs in the `with` block.

    Args:
        what: is built, as a phrase: "FlashInfer's attention".
        note: said once at the start: how long it takes, where it is kept.
        folder: the build writes into; it need not be there yet.
        num_files: .o and .so files that the build makes.
    """
    started, is_over = time.time(), threading.Event()
    show = _show_bar if sys.stderr.isatty() else _log_lines
    _LOG.warning("building %s: %s", what, note)
    thread = threading.Thread(
        target=show,
        args=(what, (folder, started), num_files, is_over),
        name="build-progress",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    _LOG.warning("built %s in %.0f s", what, time.time() - started)


def num_done(folder: Path, started: float) -> int:
    """How many .o and .so files were written since `started` (seconds since the epoch)."""
    files = (*folder.glob("*.o"), *folder.glob("*.so"))
    return sum(path.stat().st_mtime >= started for path in files)


def _show_bar(
    what: str, since: tuple[Path, float], num_files: int, is_over: threading.Event
) -> None:
    from rich.console import Console  # a server has no terminal, and may have no rich
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("building {task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=num_files)
        while not is_over.wait(POLL_S):
            bar.update(task, completed=num_done(*since))


def _log_lines(
    what: str, since: tuple[Path, float], num_files: int, is_over: threading.Event
) -> None:
    num_lines = 0
    while not is_over.wait(min(LINE_EVERY_S, COUNT_EVERY_S)):
        passed, done = time.time() - since[1], num_done(*since)
        _START.info("building %s", what, extra={"count": (done, num_files)})
        if passed >= (num_lines + 1) * LINE_EVERY_S:
            num_lines += 1
            _LOG.warning("building %s: %d of %d files, %.0f s", what, done, num_files, passed)
