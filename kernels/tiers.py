"""Triton compaction by tiers: two launches from the measures to the moved slots.

Knows nothing of policies. What it means stands at its twin in `kernels/reference/tiers.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.backend import ScoreTiers, TailRows
from zipage_lang.kernels.compact import carry_out, empty_moves, place_kept
from zipage_lang.kernels.dependent_launch import (
    launch_options,
    release_successor,
    wait_for_predecessor,
)
from zipage_lang.kernels.reference.tiers import SHARE_ONE
from zipage_lang.kernels.select import is_protected, kept_slots
from zipage_lang.kernels.tail_programs import NO_POSITION, tight_row_config

_SHARE_ONE = tl.constexpr(SHARE_ONE)
_LOT_UNIT = tl.constexpr(2.0**-24)
_MOST_MEASURES = 3


def compact_tiers(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    rows: TailRows,
    tiers: ScoreTiers,
    num_recent: int,
    num_sinks: int,
) -> None:
    """See the twin. Reads 8 bytes a slot and head and 4 for each measure, writes 8 a kept one; then
    moves 2 * 2 * head_dim elements per moved slot and head.

    A whole tail lies in the registers of one program. Each tier is one search of its threshold
    (32 counts over the tail), and the last choice another.
    """
    num_spare = _MOST_MEASURES - len(tiers.measures)
    assert num_spare >= 0, f"{len(tiers.measures)} measures, at most {_MOST_MEASURES}"
    assert len(tiers.shares) == len(tiers.measures), f"shares {tiers.shares}"
    for tensor in (*tiers.measures, tiers.history):
        assert tensor.shape == rows.positions.shape, f"{tensor.shape}, {rows.positions.shape}"
        assert tensor.is_contiguous(), f"measure of strides {tensor.stride()}"
    assert kv_blocks.shape[0] * kv_blocks.shape[2] < 2**31, f"pool of shape {kv_blocks.shape}"
    num_rows, num_kv_heads, max_tail = rows.positions.shape
    moves = empty_moves(num_rows, num_kv_heads, max_tail, rows.positions.device)
    _choose_kernel[(num_rows * num_kv_heads,)](
        score_blocks,
        position_blocks,
        rows.slots,
        rows.positions,
        rows.lens,
        rows.logical_lens,
        rows.num_keep,
        rows.seeds,
        rows.layers,
        *tiers.measures,
        *[tiers.history] * num_spare,  # never read: their share is 0
        tiers.history,
        *moves,
        max_tail,
        moves.pairs.shape[3],
        num_recent,
        num_sinks,
        *[round(share * SHARE_ONE) for share in (tiers.recent_share, *tiers.shares)],
        *[0] * num_spare,
        FRESH=int(tiers.fresh),
        HEADS=num_kv_heads,
        **tight_row_config(max_tail),
        **launch_options(rows.positions.device),
    )
    carry_out(kv_blocks, moves)


@triton.jit(
    do_not_specialize=[
        "max_tail", "most", "num_recent", "num_sinks", "recent_share", "first_share",
        "second_share", "third_share",
    ]
)  # fmt: skip
def _choose_kernel(
    score_blocks,
    position_blocks,
    slots,
    positions,
    lens,
    logical_lens,
    num_keep,
    seeds,
    layers,
    first,
    second,
    third,
    history,
    pairs,
    counts,
    max_tail,
    most,
    num_recent,
    num_sinks,
    recent_share,
    first_share,
    second_share,
    third_share,
    FRESH: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    program = tl.program_id(0)
    row = program // HEADS
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    tail_len = tl.load(lens + row).to(tl.int32)
    wanted = tl.load(num_keep + row)  # int64, as are the counts below: shares may not overflow
    real = index < tail_len
    at = tl.load(positions + base + index, mask=real, other=NO_POSITION)
    num_newest = tl.maximum(wanted * recent_share // _SHARE_ONE, num_recent)
    left = tl.maximum(wanted - num_newest, 0)
    first_newest = (tl.load(logical_lens + row) - num_newest).to(tl.int32)
    chosen = at >= first_newest
    chosen = _with_share(chosen, first + base + index, at, real, left * first_share)
    chosen = _with_share(chosen, second + base + index, at, real, left * second_share)
    chosen = _with_share(chosen, third + base + index, at, real, left * third_share)
    chosen = chosen | is_protected(at, first_newest, num_sinks)
    seed = tl.load(seeds + row) * FRESH
    lot = _lots(seed, tl.load(layers + row), program % HEADS, at)
    is_kept = kept_slots(tl.where(chosen, float("inf"), lot), at, real, wanted.to(tl.int32))
    release_successor(PDL)
    place_kept(
        is_kept, score_blocks, position_blocks, slots, num_keep, positions, history, pairs, counts,
        max_tail, most, True, HEADS, SLOTS,
    )  # fmt: skip


@triton.jit
def _with_share(chosen, measure, at, real, share):
    """And the best of the others by a measure: so many as the share has whole parts."""
    count = (share // _SHARE_ONE).to(tl.int32)
    if count > 0:
        score = tl.load(measure, mask=real, other=0.0)
        chosen = chosen | kept_slots(score, at, real & (chosen == 0), count)
    return chosen


@triton.jit
def _lots(seed, layer, head, at):
    """float32 in [0, 1) of int32 positions; seed int64, layer int64, head int32."""
    state = _mixed(seed.to(tl.uint32))
    state = _mixed(state ^ (seed >> 32).to(tl.uint32))
    state = _mixed(state ^ layer.to(tl.uint32))
    state = _mixed(state ^ head.to(tl.uint32))
    mixed = _mixed(at.to(tl.uint32) ^ state)
    return (mixed >> 8).to(tl.float32) * _LOT_UNIT


@triton.jit
def _mixed(state):
    """One round of the twin's hash, in 32 bits that wrap."""
    state = state + tl.full((), 0x9E37_79B9, tl.uint32)
    state = (state ^ (state >> 16)) * tl.full((), 0x7FEB_352D, tl.uint32)
    state = (state ^ (state >> 15)) * tl.full((), 0x846C_A68B, tl.uint32)
    return state ^ (state >> 16)
