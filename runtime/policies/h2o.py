"""The `h2o` policy: heavy hitters, by attention summed over time, and the newest (2306.14048).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

from zipage_lang.runtime.policies.measures import CHOSEN, counts_of, require
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class H2O:
    """F = decay * F + S; half of the budget goes to the newest tokens, half to the highest F.

    Source: H2O, section 4 (there S is added at every step, decay 1). Attention kernels do not show
    their weights, so here S is the mean attention of the last 16 queries at each compaction: what
    the E - 16 queries between looked at does not count.
    Reads: the tail's keys once.
    """

    name: str = "h2o"
    num_queries: int = 16
    num_recent: int = 16
    num_sinks: int = 0
    recent_share: float = 0.5  # of the budget
    decay: float = 1.0

    def __post_init__(self) -> None:
        require(self, 0, 1, "recent_share", "decay")

    def score(self, view: TailView) -> Scores:
        total = self.decay * view.history() + view.attention_mass()
        num_newest = counts_of(self.recent_share, view.num_keep)  # [num_rows]
        newest = view.positions >= (view.logical_lens - num_newest)[:, None, None]
        return Scores(keep=total.masked_fill(newest, CHOSEN), history=total)
