"""The `gkv` policy: attention that is remembered and decays, less redundancy (arXiv 2512.00504).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

import torch

from zipage_lang.kernels.reference.scores import redundancy_share
from zipage_lang.runtime.policies.measures import (
    before_recent,
    pool_in_token_order,
    require,
    require_odd,
    share_of_highest,
)
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class GKV:
    """lambda * G - (1 - lambda) * R / max R, with G = max(S / max S, alpha * F) stored as F.

    S: attention of the last 16 queries, R: softmax of each key's mean cosine to the others as in
    R-KV; both maxima are over the tail without the window, per layer and KV head. Source: G-KV,
    section 3, and its published `score_based.py`.

    Here: attention is a true share per query head before the maximum over a group. The window's
    own scores are not remembered, as there.
    Reads: the tail's keys, once for S and N / 64 times for R (from the L2); N^2 products a head.
    """

    name: str = "gkv"
    num_queries: int = 16
    num_recent: int = 16
    num_sinks: int = 0
    history_decay: float = 0.8  # alpha
    mass_weight: float = 0.5  # lambda
    pool_kernel: int = 1  # 5 where the paper pools
    similarity_threshold: float = 0.5

    def __post_init__(self) -> None:
        require(self, 0, 1, "history_decay", "mass_weight", "similarity_threshold")
        require_odd(self, "pool_kernel")

    def score(self, view: TailView) -> Scores:
        old = before_recent(view, self.num_recent)
        now = share_of_highest(view.attention_mass(), old)
        remembered = torch.maximum(now, self.history_decay * view.history())
        share = redundancy_share(view.similarity(self.similarity_threshold), view.lens, 1.0)
        redundancy = share_of_highest(share, old)
        pooled = pool_in_token_order(view, remembered, self.pool_kernel)
        weight = self.mass_weight
        return Scores(keep=weight * pooled - (1 - weight) * redundancy, history=remembered)
