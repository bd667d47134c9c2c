"""The `kvcompress` policy: squared attention, heads differ in rate (KV-Compress, arXiv 2410.00161).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.kernels.reference.scores import squared_mass
from zipage_lang.kernels.reference.select import select_top_k
from zipage_lang.runtime.policies.measures import before_recent
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class KVCompress:
    """Squared attention shares, summed over the last queries and a KV head's query heads.

    All heads of a layer compete for H * K places, so each keeps as many by score as it earns.
    Source: KV-Compress, section 3 (metric "KVC-w" with w = 8 and w = 32).

    Here: a block spans all heads of all layers, so a head that earns less than K slots frees no
    memory for one that earns more: as published it can't save memory in this layout. The nearest
    form: a head keeps what it earned, at most K, and fills the places it did not earn with its
    newest tokens. Layers do not compete, since each layer is bounded by K.
    Reads: the tail's keys once, through a gathered float32 copy, piece by piece.
    """

    name: str = "kvcompress"
    num_queries: int = 8
    num_recent: int = 8
    num_sinks: int = 0

    def score(self, view: TailView) -> Scores:
        columns = self.num_queries * _group(view)
        vectors = 2 + -(-2 * columns // view.kv_blocks.shape[-1])
        metric = view.in_pieces(_squared_mass, vectors)
        earned = self._earned(view, metric)
        age = (view.logical_lens[:, None, None] - view.positions).float()
        return Scores(keep=torch.where(earned, metric, -age))  # a newest token has age 1

    def _earned(self, view: TailView, metric: Tensor) -> Tensor:
        """The best H * (K - recent) slots of a row over all heads, bool of the metric's shape."""
        num_rows, num_kv_heads, max_tail = metric.shape
        old = before_recent(view, self.num_recent)
        # Slot by slot, head by head, so that real slots stand before padding.
        flat = metric.masked_fill(~old, -1.0).transpose(1, 2).reshape(num_rows, 1, -1)
        heads = torch.arange(num_kv_heads, device=metric.device, dtype=torch.int32)
        ranks = view.positions * num_kv_heads + heads[:, None]
        ranks = ranks.transpose(1, 2).reshape(num_rows, 1, -1)  # distinct within a row
        free = (view.num_keep - self.num_recent).clamp(min=1)  # [num_rows]
        chosen = select_top_k(flat, ranks, view.lens * num_kv_heads, free * num_kv_heads)
        return chosen.view(num_rows, max_tail, num_kv_heads).transpose(1, 2) & old


def _squared_mass(view: TailView) -> Tensor:
    return squared_mass(
        view.kv_blocks, view.slots, view.positions, view.asked_queries(), view.scale
    )


def _group(view: TailView) -> int:
    return view.asked_queries().ring.shape[1] // view.positions.shape[1]
