"""The `vase` policy: wide values stay, the rest is drawn by attention (VaSE, arXiv 2606.03928).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

from torch import Tensor

from zipage_lang.runtime.policies.measures import (
    CHOSEN,
    counts_of,
    lots,
    pool_in_token_order,
    require,
    require_odd,
)
from zipage_lang.runtime.policies.policy import Scores, TailView

_TINY_MASS = 1e-30


@dataclasses.dataclass(frozen=True)
class VaSE:
    """A quarter of K by the range (max - min) of the value, the rest by a weighted lottery.

    Sinks and the newest 64 tokens stay. What is left is drawn without replacement, each token with
    the weight of its pooled SnapKV score: the highest of log(weight) + Gumbel noise win.
    Source: VaSE, section 4.

    Here: sinks are the oldest tokens still in the tail; with a protected prompt they come on top.
    Reads: the tail's keys once, and the new tokens' values; older ranges are remembered.
    """

    name: str = "vase"
    num_queries: int = 16
    num_recent: int = 64
    num_sinks: int = 4
    range_share: float = 0.25  # of the budget
    pool_kernel: int = 7
    lottery: bool = True  # False: the highest pooled scores themselves

    def __post_init__(self) -> None:
        require(self, 0, 1, "range_share")
        require_odd(self, "pool_kernel")

    def score(self, view: TailView) -> Scores:
        ranges = view.remembered(TailView.value_range)
        wide = view.highest(ranges, counts_of(self.range_share, view.num_keep))
        weight = pool_in_token_order(view, view.attention_mass(), self.pool_kernel)
        score = weight.clamp(min=_TINY_MASS).log()
        if self.lottery:
            score = score + gumbel(lots(view, fresh=True))
        return Scores(keep=score.masked_fill(wide, CHOSEN), history=ranges)


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise of lots in [0, 1), in float64: near 1 a float32 has too few digits."""
    open_unit = uniform.double() + 2.0**-25  # the middle of each lot's interval
    return -(-open_unit.log()).log().float()
