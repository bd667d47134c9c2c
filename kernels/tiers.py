"""Triton compaction by tiers: two launches from the measures to the moved slots.

Knows nothing of policies. What it means stands at its twin in `kernels/reference/tiers.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.backend import ScoreTiers, TailRows
from zipage_lang.kernels.compact import carry_out, empty_moves, place_kept
from zipage_lang.kernels.reference.tiers import SHARE_ONE
from zipage_lang.kernels.select import is_protected, kept_slots
from zipage_lang.kernels.tail_programs import NO_POSITION, remembered_mass, tight_row_config

_SHARE_ONE = tl.constexpr(SHARE_ONE)
_LOT_UNIT = tl.constexpr(2.0**-24)


def compact_tiers(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    rows: TailRows,
    tiers: ScoreTiers,
    num_recent: int,
    num_sinks: int,
) -> None:
    """See the twin. Reads 12 bytes a slot and head and 4 for each measure that has a share, writes
    4 of scratch and 8 a kept one; then moves 2 * 2 * head_dim elements per moved slot and head.

    A whole tail lies in the registers of one program. Each tier is one search of its threshold
    (32 counts over the tail), and the last choice another.
    """
    mass, measures = tiers.mass, (tiers.mass, tiers.ranges, tiers.novelty)
    assert tiers.pool_kernel % 2 == 1, f"pooling kernel {tiers.pool_kernel} must be odd"
    for measure in measures:
        assert measure.shape == mass.shape, f"{measure.shape}, {mass.shape}"
        assert measure.is_contiguous(), f"measure of strides {measure.stride()}"
    assert kv_blocks.shape[0] * kv_blocks.shape[2] < 2**31, f"pool of shape {kv_blocks.shape}"
    num_rows, num_kv_heads, max_tail = mass.shape
    moves = empty_moves(num_rows, num_kv_heads, max_tail, mass.device)
    _choose_kernel[(num_rows * num_kv_heads,)](
        score_blocks,
        position_blocks,
        rows.slots,
        rows.positions,
        rows.lens,
        rows.stateful_lens,
        rows.logical_lens,
        rows.num_keep,
        rows.seeds,
        rows.layers,
        *measures,
        torch.empty_like(mass),
        *moves,
        max_tail,
        moves.pairs.shape[3],
        num_recent,
        num_sinks,
        tiers.decay,
        round(tiers.recent_share * SHARE_ONE),
        round(tiers.mass_share * SHARE_ONE),
        round(tiers.range_share * SHARE_ONE),
        round(tiers.novelty_share * SHARE_ONE),
        FRESH=int(tiers.fresh),
        HEADS=num_kv_heads,
        REACH=tiers.pool_kernel // 2,
        **tight_row_config(max_tail),
    )
    carry_out(kv_blocks, moves)


@triton.jit(
    do_not_specialize=[
        "max_tail", "most", "num_recent", "num_sinks", "recent_share", "mass_share", "range_share",
        "novelty_share",
    ]
)  # fmt: skip
def _choose_kernel(
    score_blocks,
    position_blocks,
    slots,
    positions,
    lens,
    stateful_lens,
    logical_lens,
    num_keep,
    seeds,
    layers,
    mass,
    ranges,
    novelty,
    stored,
    pairs,
    counts,
    max_tail,
    most,
    num_recent,
    num_sinks,
    decay,
    recent_share,
    mass_share,
    range_share,
    novelty_share,
    FRESH: tl.constexpr,
    HEADS: tl.constexpr,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // HEADS
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    tail_len = tl.load(lens + row).to(tl.int32)
    stateful_len = tl.load(stateful_lens + row).to(tl.int32)
    wanted = tl.load(num_keep + row)  # int64, as are the counts below: shares may not overflow
    real = index < tail_len
    own = remembered_mass(
        mass, score_blocks, slots, stored, program, tail_len, stateful_len, max_tail, decay,
        HEADS, REACH, SLOTS,
    )  # fmt: skip
    at = tl.load(positions + base + index, mask=real, other=NO_POSITION)
    num_newest = tl.maximum(wanted * recent_share // _SHARE_ONE, num_recent)
    left = tl.maximum(wanted - num_newest, 0)
    first_newest = (tl.load(logical_lens + row) - num_newest).to(tl.int32)
    chosen = at >= first_newest
    count = (left * mass_share // _SHARE_ONE).to(tl.int32)
    chosen = _with_best(chosen, own, at, real, count)
    count = (left * range_share // _SHARE_ONE).to(tl.int32)
    measure = tl.load(ranges + base + index, mask=real & (count > 0), other=0.0)
    chosen = _with_best(chosen, measure, at, real, count)
    count = (left * novelty_share // _SHARE_ONE).to(tl.int32)
    measure = tl.load(novelty + base + index, mask=real & (count > 0), other=0.0)
    chosen = _with_best(chosen, measure, at, real, count)
    chosen = chosen | is_protected(at, first_newest, num_sinks)
    seed = tl.load(seeds + row) * FRESH
    lot = _lots(seed, tl.load(layers + row), program % HEADS, at)
    is_kept = kept_slots(tl.where(chosen, float("inf"), lot), at, real, wanted.to(tl.int32))
    place_kept(
        is_kept, score_blocks, position_blocks, slots, num_keep, positions, stored, pairs, counts,
        max_tail, most, True, HEADS, SLOTS,
    )  # fmt: skip


@triton.jit
def _with_best(chosen, score, at, real, count):
    """And the `count` best of the others."""
    if count > 0:
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
