"""Compaction by tiers in one call: the budget is divided, and each part chooses by its own measure.

Knows nothing of policies. Beside it the lots that a part may choose by: a hash of the position.
"""

import math

import torch
from torch import Tensor

from zipage_lang.kernels.backend import ScoreTiers, TailRows
from zipage_lang.kernels.reference.compact import fill_holes
from zipage_lang.kernels.reference.select import protect_slots, select_top_k

SHARE_ONE = 1 << 16  # shares of a budget are counted in whole parts of this
_LOW_32_BITS = 0xFFFF_FFFF
_FRACTION_BITS = 24  # what a float32 holds exactly


def compact_tiers(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    rows: TailRows,
    tiers: ScoreTiers,
    num_recent: int,
    num_sinks: int,
) -> None:
    """Keep `rows.num_keep` slots of every row and head, chosen tier by tier, and move them up.

    1. The newest max(num_recent, recent_share * K) positions. What is left of K is R.
    2. Measure by measure, share * R of those that no earlier part took, by the measure.
    3. What is left by lot; the oldest `num_sinks` of the tail come before anything but the newest.
    Equal scores: the newer token. Counts are rounded down.

    Pools as in `compact_blend`: kv_blocks [num_blocks, 2, block_size, num_kv_heads, head_dim] of
    all layers, written; score_blocks float32 [num_blocks, block_size, num_kv_heads], written with
    `tiers.history`; position_blocks int32, written.
    """
    tails = (rows.positions, rows.lens)
    scores = protect_slots(
        tier_scores(rows, tiers, num_recent), *tails, rows.logical_lens, 0, num_sinks
    )
    fill_holes(
        kv_blocks,
        score_blocks,
        position_blocks,
        rows.slots,
        select_top_k(scores, *tails, rows.num_keep),
        rows.num_keep,
        rows.positions,
        tiers.history,
    )


def tier_scores(rows: TailRows, tiers: ScoreTiers, num_recent: int) -> Tensor:
    """A score whose K highest are the chosen ones, float32 of the measures' shape."""
    num_newest = _share(rows.num_keep, tiers.recent_share).clamp(min=num_recent)  # [num_rows]
    left = (rows.num_keep - num_newest).clamp(min=0)  # [num_rows]
    chosen = rows.positions >= (rows.logical_lens - num_newest)[:, None, None]
    for scores, share in zip(tiers.measures, tiers.shares, strict=True):
        count = _share(left, share)  # [num_rows]
        scores = scores.masked_fill(chosen, -math.inf)
        best = select_top_k(scores, rows.positions, rows.lens, count.clamp(min=1))
        chosen = chosen | (best & (count > 0)[:, None, None])
    seeds = rows.seeds if tiers.fresh else torch.zeros_like(rows.seeds)
    return lots(seeds, rows.layers, rows.positions).masked_fill(chosen, math.inf)


def lots(seeds: Tensor, layers: Tensor, positions: Tensor) -> Tensor:
    """A lot in [0, 1) for every token: a hash of (seed, layer, KV head, position).

    It depends neither on the batch nor on the slot the token lies in.
    seeds, layers: int64 [num_rows]; positions: int32 [num_rows, num_kv_heads, max_tail].
    Returns float32 of the positions' shape, exact.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)
    state = _mix(seeds & _LOW_32_BITS)  # [num_rows]
    state = _mix(state ^ ((seeds >> 32) & _LOW_32_BITS))
    state = _mix(state ^ layers)
    state = _mix(state[:, None] ^ heads)  # [num_rows, num_kv_heads]
    state = _mix(state[..., None] ^ positions.long())
    return (state >> (32 - _FRACTION_BITS)).float() / 2.0**_FRACTION_BITS


def _share(counts: Tensor, share: float) -> Tensor:
    return (counts * round(share * SHARE_ONE)) // SHARE_ONE


def _mix(state: Tensor) -> Tensor:
    """One round of a 32-bit integer hash (xor-shift and odd multipliers), in int64 arithmetic.

    The offset keeps 0 from hashing to 0. Only the low 32 bits of a product are used, and those
    survive int64 overflow.
    """
    state = (state + 0x9E37_79B9) & _LOW_32_BITS
    state = ((state ^ (state >> 16)) * 0x7FEB_352D) & _LOW_32_BITS
    state = ((state ^ (state >> 15)) * 0x846C_A68B) & _LOW_32_BITS
    return state ^ (state >> 16)
