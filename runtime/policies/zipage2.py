"""The `zipage2` policy: the budget is divided between the newest, attention, recall and a lot.

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

from torch import Tensor

from zipage_lang.kernels.backend import ScoreTiers
from zipage_lang.runtime.policies.measures import require, require_odd
from zipage_lang.runtime.policies.policy import TailView


@dataclasses.dataclass(frozen=True)
class Zipage2:
    name: str = "zipage2"
    num_queries: int = 16
    num_recent: int = 16
    num_sinks: int = 0
    recent_share: float = 0.15  # of the budget
    mass_share: float = 0.25  # of what is left of it, as are the next two
    range_share: float = 0.5
    novelty_share: float = 0.0
    history_decay: float = 0.8
    pool_kernel: int = 1
    fresh: bool = True
    similarity_threshold: float = 0.5
    redundancy_chunk: int = 256

    def __post_init__(self) -> None:
        shares = ("mass_share", "range_share", "novelty_share")
        require(self, 0, 1, "recent_share", *shares, "history_decay", "similarity_threshold")
        require(self, 1, 2**20, "redundancy_chunk")
        require_odd(self, "pool_kernel")
        total = sum(getattr(self, share) for share in shares)
        if total > 1 + 1e-9:
            raise ValueError(f"{', '.join(shares)} may not be more than 1 together, not {total}")

    def score(self, view: TailView) -> ScoreTiers:
        mass, novelty = self._mass_and_novelty(view)
        return ScoreTiers(
            mass=mass,
            ranges=view.value_range() if self.range_share > 0 else mass,
            novelty=novelty,
            decay=self.history_decay,
            pool_kernel=self.pool_kernel,
            recent_share=self.recent_share,
            mass_share=self.mass_share,
            range_share=self.range_share,
            novelty_share=self.novelty_share,
            fresh=self.fresh,
        )

    def _mass_and_novelty(self, view: TailView) -> tuple[Tensor, Tensor]:
        if self.novelty_share == 0:
            mass = view.attention_mass()
            return mass, mass
        mass, similarity = view.mass_and_similarity(
            self.redundancy_chunk, self.similarity_threshold
        )
        return mass, -similarity
