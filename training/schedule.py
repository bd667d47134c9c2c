"""How far the training is, by the clock or by steps, and the learning rate there.

Knows nothing of optimizers or models.
"""

import time
from collections.abc import Callable
from typing import Protocol

WARM_UP = 0.01  # share of the training in which the rate rises from nothing
CONSTANT_UNTIL = 0.45  # from here it falls in a straight line to nothing


def rate_factor(progress: float) -> float:
    """Factor on the peak learning rate; `progress` goes from 0 to 1 over the whole training."""
    rising = progress / WARM_UP
    falling = (1 - progress) / (1 - CONSTANT_UNTIL)
    return max(0.0, min(1.0, rising, falling))


class Progress(Protocol):
    """Where a training stands. It ends for now when `now()` reaches `until`."""

    until: float

    def start(self) -> None:
        """The first step of this piece is about to be made."""
        ...

    def now(self, num_steps: int) -> float:
        """From 0 to 1, after `num_steps` steps of the whole training."""
        ...


class TimedProgress:
    """From where the last piece ended to `until`, evenly over the time that this piece has."""

    def __init__(
        self,
        begin: float,
        until: float,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """deadline: by the clock, in seconds; whatever came before `start` is lost time."""
        self.begin, self.until = begin, until
        self._deadline, self._clock = deadline, clock
        self._started = clock()

    def start(self) -> None:
        self._started = self._clock()

    def now(self, num_steps: int) -> float:
        span = max(1e-3, self._deadline - self._started)
        share = (self._clock() - self._started) / span
        return self.begin + (self.until - self.begin) * min(1.0, share)


class CountedProgress:
    """Evenly over a number of steps: the same on every machine."""

    def __init__(self, total_steps: int, until: float) -> None:
        self.total_steps, self.until = total_steps, until

    def start(self) -> None:
        """Steps count by themselves."""

    def now(self, num_steps: int) -> float:
        return num_steps / self.total_steps
