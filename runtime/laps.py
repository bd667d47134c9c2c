"""Seconds between marks: what a start-up spends its time on.

Knows nothing of what is timed.
"""

import time


class Laps:
    """Seconds between marks, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def end(self, name: str) -> None:
        """What passed since the last mark was `name`."""
        now = time.perf_counter()
        self.seconds[name], self._started = now - self._started, now
