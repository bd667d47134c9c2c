"""Axes of a plot: where values lie on it and which ticks it shows.

Knows nothing of what is drawn.
"""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from low..high onto start..end, evenly or by ratio."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where the value lies."""
        low, high, here = self._scaled(self.low), self._scaled(self.high), self._scaled(value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def even_ticks(low: float, high: float, wanted: int) -> list[float]:
    """About `wanted` round values from low to high."""
    raw = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def share_bounds(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """Bounds in tenths, at least two of them, that hold all values between 0 and 1."""
    low = math.floor(10 * min(lows, default=0.0) + 1e-9)
    high = math.ceil(10 * max(highs, default=1.0) - 1e-9)
    high = min(10, max(high, low + 2))
    low = max(0, min(low, high - 2))
    return low / 10, high / 10


def padded(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    """Bounds with room at both ends; even axes begin at 0 where the values reach far down."""
    low, high = min(values), max(values)
    if is_log:
        factor = max((high / low) ** 0.08, 1.15)
        return low / factor, high * factor
    room = 0.08 * max(high - low, 0.1 * high, 1e-9)
    return (0.0 if low < high / 2 else low - room), high + room
