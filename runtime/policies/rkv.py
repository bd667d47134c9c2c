"""The `rkv` policy: attention and redundancy of keys, weighed (R-KV, arXiv 2505.24133).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

from zipage_lang.kernels.reference.scores import redundancy_share
from zipage_lang.runtime.policies.measures import (
    before_recent,
    pool_in_token_order,
    require,
    require_odd,
    share_of_total,
)
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class RKV:
    """lambda * I - (1 - lambda) * R, per layer and KV head (there equations 1 to 7).

    I: share of the last 8 queries' attention over the tail without the window, max-pooled over 7
    neighbours in the text. R: softmax over the tail of each key's mean cosine to all keys, in
    which every column's newest entry above 0.5 counts as zero.

    Here: attention is a share per query head (its log-sum-exp is known) before the maximum over
    the heads of a group, where the published code takes the maximum of logits first; and a
    protected prompt takes no part in R. Repeats every E tokens as asked (128 there).
    Reads: the tail's keys, once for I and N / 64 times for R (from the L2); N^2 products a head.
    """

    name: str = "rkv"
    num_queries: int = 8
    num_recent: int = 8
    num_sinks: int = 0
    mass_weight: float = 0.1  # lambda; 0.5 did better on small models (arXiv 2609.03430)
    pool_kernel: int = 7
    similarity_threshold: float = 0.5

    def __post_init__(self) -> None:
        require(self, 0, 1, "mass_weight", "similarity_threshold")
        require_odd(self, "pool_kernel")

    def score(self, view: TailView) -> Scores:
        share = share_of_total(view.attention_mass(), before_recent(view, self.num_recent))
        importance = pool_in_token_order(view, share, self.pool_kernel)
        redundancy = redundancy_share(view.similarity(self.similarity_threshold), view.lens, 1.0)
        weight = self.mass_weight
        return Scores(keep=weight * importance - (1 - weight) * redundancy)
