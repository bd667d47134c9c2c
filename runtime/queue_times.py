"""How long requests waited for their first place in a step, as a cumulative histogram.

Knows nothing of requests or of who asks.
"""

import bisect
import itertools

BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class QueueTimes:
    """Counts per bucket, and their sum in seconds."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def note(self, waited_s: float) -> None:
        self.sum_s += waited_s
        self._counts[bisect.bisect_left(BOUNDS_S, waited_s)] += 1

    def stats(self) -> dict[str, int | float]:
        """`queue_s_le_B`: how many waited at most B seconds; `queue_s_sum`; `queue_s_count`."""
        totals = itertools.accumulate(self._counts)
        named: dict[str, int | float] = {
            f"queue_s_le_{bound:g}": total for bound, total in zip(BOUNDS_S, totals, strict=False)
        }
        return {**named, "queue_s_count": sum(self._counts), "queue_s_sum": self.sum_s}
