"""The `tiers` policy: the budget is divided between the newest, attention, recall and a lot.

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.kernels.backend import ScoreTiers
from zipage_lang.runtime.policies.measures import pool_in_token_order, require, require_odd
from zipage_lang.runtime.policies.policy import TailView


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Several measures at once, none of them calibrated.

    Of the budget K, a share goes to the newest tokens; of the rest R, in this order,

        mass_share     to the highest G = max(S, alpha * F): attention of the last queries, or
                       what is left of it since it was paid; G is remembered as F (from Zipage)
        range_share    to the widest values, max - min over dimensions (from VaSE)
        novelty_share  to the keys least like the others of their chunk: Zipage's R, unscaled
        the rest       to lots (from Random Attention), drawn anew at each compaction or for good

    each per layer and KV head, among those that no earlier part took. What was said once and is
    asked for late is found by values and keys, not by what is attended to now; shares of the
    budget keep one measure from taking the place of another, as weights in one sum do.
    Each part goes away with its share; G without memory has `history_decay=0`. A protected prompt
    comes on top of K, and is what attention scores need most: see `protect`.
    Reads: the tail's keys and values once. With `novelty_share=0` no keys are compared.
    """

    name: str = "tiers"
    num_queries: int = 16
    num_recent: int = 16  # newest tokens that stay in any case
    num_sinks: int = 0
    recent_share: float = 0.1  # of the budget
    mass_share: float = 0.25  # of what is left of it, as are the next two
    range_share: float = 0.35
    novelty_share: float = 0.3
    history_decay: float = 0.8  # alpha
    pool_kernel: int = 1  # of G, at a request's first compaction
    fresh: bool = True  # False: a token's lot is drawn once
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
        remembered = torch.maximum(mass, self.history_decay * view.history())
        parts = [(self.mass_share, self._pooled_at_first(view, remembered))]
        if self.range_share > 0:
            parts.append((self.range_share, view.value_range()))
        if novelty is not None:
            parts.append((self.novelty_share, novelty))
        return ScoreTiers(
            measures=tuple(measure for _, measure in parts),
            shares=tuple(share for share, _ in parts),
            history=remembered,
            recent_share=self.recent_share,
            fresh=self.fresh,
        )

    def _mass_and_novelty(self, view: TailView) -> tuple[Tensor, Tensor | None]:
        if self.novelty_share == 0:
            return view.attention_mass(), None
        mass, similarity = view.mass_and_similarity(
            self.redundancy_chunk, self.similarity_threshold
        )
        return mass, -similarity

    def _pooled_at_first(self, view: TailView, mass: Tensor) -> Tensor:
        if self.pool_kernel == 1:
            return mass
        pooled = pool_in_token_order(view, mass, self.pool_kernel)
        return torch.where(view.is_first[:, None, None], pooled, mass)
