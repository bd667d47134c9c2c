"""The `pyramidkv` policy: deeper layers choose fewer tokens by attention (arXiv 2406.02069).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.runtime.policies.measures import (
    CHOSEN,
    before_recent,
    pool_in_token_order,
    require,
    require_odd,
)
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class PyramidKV:
    """SnapKV's score; how many tokens it chooses falls linearly with depth.

    Layer l of L chooses (K - w) * (1 - (1 - 1 / beta) * l / (L - 1)) tokens, so the last layer
    1 / beta of the first (there equations 4 and 5, beta = 20).

    Here: one block table serves all layers, so a layer that keeps fewer slots than the first frees
    nothing: as published it can't save memory in this layout. The nearest form that does: every
    layer has the same K slots, all of them real, none padding. Deep layers, whose attention is
    said to gather on few tokens, choose few; the rest of their K holds their newest tokens.
    Reads: the tail's keys once.
    """

    name: str = "pyramidkv"
    num_queries: int = 16  # w
    num_recent: int = 16
    num_sinks: int = 0
    beta: float = 20.0
    pool_kernel: int = 7

    def __post_init__(self) -> None:
        require(self, 1, 1e6, "beta")
        require_odd(self, "pool_kernel")

    def score(self, view: TailView) -> Scores:
        pooled = pool_in_token_order(view, view.attention_mass(), self.pool_kernel)
        old = before_recent(view, self.num_recent)
        chosen = view.highest(pooled.masked_fill(~old, -1.0), self._num_chosen(view)) & old
        return Scores(keep=torch.where(chosen, CHOSEN, view.positions.float()))

    def _num_chosen(self, view: TailView) -> Tensor:
        """int64 [num_rows]."""
        depth = view.layers.double() / max(view.num_layers - 1, 1)
        share = 1 - (1 - 1 / self.beta) * depth
        return ((view.num_keep - self.num_recent).clamp(min=0) * share).floor().long()
