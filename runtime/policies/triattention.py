"""The `triattention` policy: what average queries will see of a key (TriAttention, 2604.04921).

Knows nothing of the queries of the request at hand, of blocks or of how slots are moved.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.runtime.policies.policy import QueryStats, Scores, TailView

_NUM_DISTANCES = 17  # 1, 2, 4 .. 65536 tokens ahead


@dataclasses.dataclass(frozen=True)
class TriAttention:
    """Per RoPE frequency f: Re(mean q_f * conj(k_f) * e^(i t w_f)), averaged over the distances
    1, 2, 4 .. 65536 ahead of the newest token, plus (mean |q_f| - |mean q_f|) * |k_f|; summed over
    f, standardised over the tail per query head, then the maximum over a KV head's query heads.

    Source: TriAttention, section 4 (scores "trig" and "norm"); k_f is the key as stored, rotated,
    so the angle is that of the query's position t alone.

    Here: the query statistics come from text that the model itself writes, measured once when a
    request first asks for this policy (`runtime/query_stats.py`), not from a file made from a
    corpus. They differ a little between number formats and backends, and so may keep-sets.
    Reads: the tail's keys once, through a gathered float32 copy, piece by piece.
    """

    name: str = "triattention"
    num_queries: int = 0
    num_recent: int = 128
    num_sinks: int = 0
    needs_query_stats = True  # no parameter: has no annotation

    def score(self, view: TailView) -> Scores:
        return Scores(keep=view.in_pieces(_expected, vectors=5))


def _expected(view: TailView) -> Tensor:
    stats = view.calibration.query_stats
    assert stats is not None, "the compressor has no query statistics"
    keys = view.keys()  # [num_rows, num_kv_heads, max_tail, head_dim]
    real, imaginary = keys.chunk(2, dim=-1)  # [.., head_dim / 2] each
    lengths = torch.hypot(real, imaginary)
    ahead, spread = _directions(stats, view)  # [num_rows, num_kv_heads, group, ..] each
    scores = keys @ ahead.transpose(2, 3) + lengths @ spread.transpose(2, 3)
    return _standardised(scores.transpose(2, 3), view).amax(dim=2)


def _directions(stats: QueryStats, view: TailView) -> tuple[Tensor, Tensor]:
    """What a key's dimensions, and its lengths by frequency, are to be weighed with."""
    center = stats.center[view.layers]  # [num_rows, num_q_heads, head_dim]
    real, imaginary = center.chunk(2, dim=-1)  # [num_rows, num_q_heads, head_dim / 2] each
    distances = 1 << torch.arange(_NUM_DISTANCES, device=center.device)
    positions = (view.logical_lens - 1)[:, None] + distances  # [num_rows, num_distances]
    # Angles of 100,000 radians need float64.
    angles = positions.double()[..., None] * stats.frequencies.double()
    cos = angles.cos().mean(1).float()[:, None]  # [num_rows, 1, head_dim / 2]
    sin = angles.sin().mean(1).float()[:, None]
    ahead = torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    spread = (stats.length[view.layers] - torch.hypot(real, imaginary)).clamp(min=0)
    by_group = (len(center), view.positions.shape[1], -1)
    return ahead.view(*by_group, ahead.shape[-1]), spread.view(*by_group, spread.shape[-1])


def _standardised(scores: Tensor, view: TailView) -> Tensor:
    """Mean 0 and variance 1 over the real slots. scores: [num_rows, heads, group, max_tail]."""
    valid = view.valid[:, None, None]
    count = view.lens[:, None, None, None]
    mean = scores.masked_fill(~valid, 0.0).sum(-1, keepdim=True) / count
    offset = (scores - mean).masked_fill(~valid, 0.0)
    deviation = (offset.square().sum(-1, keepdim=True) / count).sqrt()
    return offset / deviation.clamp(min=1e-12)
