"""Shows a `Progress` while a call runs: a bar on stderr, the caller's function, or nothing.

Knows nothing of engines or requests.
"""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from zipage_lang.frontend.outputs import Progress

Report = Callable[[Progress], None]


@contextlib.contextmanager
def progress_reporter(progress: bool | Report) -> Iterator[Report]:
    """What to call with each new state: draws a bar for True, does nothing for False."""
    if callable(progress):
        yield progress
    elif progress:
        with progress_bar() as report:
            yield report
    else:
        yield lambda _: None


@contextlib.contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar on stderr: samples finished, tokens generated, tokens per second."""
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_tokens]} tokens, {task.fields[rate]:.0f} tok/s"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task_id = bar.add_task("", num_tokens=0, rate=0.0)

        def report(progress: Progress) -> None:
            elapsed_s = bar.tasks[0].elapsed or 0.0
            bar.update(
                task_id,
                total=progress.num_samples,
                completed=progress.num_finished,
                num_tokens=progress.num_tokens,
                rate=progress.num_tokens / elapsed_s if elapsed_s else 0.0,
            )

        yield report
