"""How often each family and level is drawn: easy levels first, later what is still got wrong.

Knows nothing of how problems are drawn or answers judged.
"""

import math
from collections.abc import Sequence

EASY_UNTIL = 0.12  # share of the training during which easy levels come more often
EASY_TILT = 3.0  # at the start, the easiest level comes e**3 times as often as the hardest
LEAST = 0.3  # weight of a cell that is always right; one that is always wrong has 1 + LEAST


class Mixture:
    """Weights of the cells. Families start even; a family's share is spread over its levels."""

    def __init__(self, cells: Sequence[tuple[str, int]]) -> None:
        families = [family for family, _ in cells]
        self._heights = [_height(level, families.count(family)) for family, level in cells]
        self._shares = [1 / families.count(family) for family in families]
        self.wrong = [1.0] * len(cells)  # share of held-out problems got wrong, smoothed

    def observe(self, right: Sequence[float]) -> None:
        """Take in the shares of held-out problems got right, one per cell."""
        self.wrong = [(old + 1 - new) / 2 for old, new in zip(self.wrong, right, strict=True)]

    def weights(self, progress: float) -> list[float]:
        """One weight per cell, summing to 1; `progress` goes from 0 to 1 over the training."""
        tilt = EASY_TILT * max(0.0, 1 - progress / EASY_UNTIL)
        raw = [
            share * (LEAST + wrong) * math.exp(-tilt * height)
            for share, wrong, height in zip(self._shares, self.wrong, self._heights, strict=True)
        ]
        return [weight / sum(raw) for weight in raw]


def _height(level: int, num_levels: int) -> float:
    """0 for the easiest level, 1 for the hardest."""
    return level / max(1, num_levels - 1)
