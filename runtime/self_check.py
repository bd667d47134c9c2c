"""Looks now and then whether all laws of the scheduler hold, where the environment asks for it.

For soaks and for hunting faults: `ZIPAGE_CHECK_EVERY=100` checks every 100 steps, at a cost that
grows with the pool. An engine that finds a law broken ends, which is better than going on wrong.
Knows nothing of what the laws are.
"""

from collections.abc import Callable, Mapping

CHECK_EVERY = "ZIPAGE_CHECK_EVERY"


class SelfCheck:
    """Counts steps; off unless asked for."""

    def __init__(self, check: Callable[[], None], environment: Mapping[str, str]) -> None:
        """check: raises AssertionError where a law is broken.

        Raises ValueError where the environment asks for what is no number of steps.
        """
        asked = environment.get(CHECK_EVERY, "0")
        if not asked.isdecimal():
            raise ValueError(f"{CHECK_EVERY}={asked!r} must be a number of steps, 0 for never")
        self._check, self._every = check, int(asked)
        self._num_since = 0
        self.num_checks = 0

    def note_step(self) -> None:
        """A step was taken in."""
        if self._every == 0:
            return
        self._num_since += 1
        if self._num_since >= self._every:
            self._num_since = 0
            self._check()
            self.num_checks += 1
