"""Triton compaction by a blended score: two launches from the score's parts to the moved slots.

Knows nothing of policies. What it means stands at its twin in `kernels/reference/blend.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.backend import ScoreBlend, TailRows
from zipage_lang.kernels.compact import carry_out, empty_moves, place_kept
from zipage_lang.kernels.dependent_launch import (
    launch_options,
    release_successor,
    wait_for_predecessor,
)
from zipage_lang.kernels.select import is_protected, kept_slots
from zipage_lang.kernels.tail_programs import NO_POSITION, tight_row_config


def compact_blend(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    rows: TailRows,
    blend: ScoreBlend,
    num_recent: int,
    num_sinks: int,
) -> None:
    """See the twin. Reads 16 bytes a slot and head and writes 4 of scratch and 8 a kept one; then
    moves 2 * 2 * head_dim elements per moved slot and head.

    A whole tail lies in the registers of one program, score and all: nothing in between is stored.
    """
    mass, similarity, decay, pool_kernel, temperature, mass_weight = blend
    assert pool_kernel % 2 == 1, f"pooling kernel {pool_kernel} must be odd to be centred"
    assert similarity.shape == mass.shape, f"{similarity.shape}, {mass.shape}"
    assert mass.is_contiguous(), f"mass of strides {mass.stride()}"
    assert similarity.is_contiguous(), f"similarity of strides {similarity.stride()}"
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
        mass,
        similarity,
        torch.empty_like(mass),
        *moves,
        max_tail,
        moves.pairs.shape[3],
        num_recent,
        num_sinks,
        decay,
        1.0 / temperature,
        mass_weight,
        HEADS=num_kv_heads,
        REACH=pool_kernel // 2,
        **tight_row_config(max_tail),
        **launch_options(mass.device),
    )
    carry_out(kv_blocks, moves)


@triton.jit(do_not_specialize=["max_tail", "most", "num_recent", "num_sinks"])
def _choose_kernel(
    score_blocks,
    position_blocks,
    slots,
    positions,
    lens,
    stateful_lens,
    logical_lens,
    num_keep,
    mass,
    similarity,
    stored,
    pairs,
    counts,
    max_tail,
    most,
    num_recent,
    num_sinks,
    decay,
    inverse_temperature,
    mass_weight,
    HEADS: tl.constexpr,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    program = tl.program_id(0)
    row = program // HEADS
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    tail_len = tl.load(lens + row).to(tl.int32)
    stateful_len = tl.load(stateful_lens + row).to(tl.int32)
    real = index < tail_len
    pooled = _remembered_mass(
        mass, score_blocks, slots, stored, program, tail_len, stateful_len, max_tail, decay,
        HEADS, REACH, SLOTS,
    )  # fmt: skip
    likeness = tl.load(similarity + base + index, mask=real, other=-float("inf"))
    weights = tl.exp((likeness - tl.max(likeness, axis=0)) * inverse_temperature)
    share = weights / tl.sum(weights, axis=0)
    score = mass_weight * pooled - (1.0 - mass_weight) * share
    at = tl.load(positions + base + index, mask=real, other=NO_POSITION)
    first_recent = (tl.load(logical_lens + row) - num_recent).to(tl.int32)
    score = tl.where(is_protected(at, first_recent, num_sinks), float("inf"), score)
    is_kept = kept_slots(score, at, real, tl.load(num_keep + row).to(tl.int32))
    release_successor(PDL)
    place_kept(
        is_kept, score_blocks, position_blocks, slots, num_keep, positions, stored, pairs, counts,
        max_tail, most, True, HEADS, SLOTS,
    )  # fmt: skip


@triton.jit
def _remembered_mass(
    mass,
    score_blocks,
    slots,
    stored,
    program,
    tail_len,
    stateful_len,
    max_tail,
    decay,
    HEADS: tl.constexpr,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """max(mass, decay * what was stored before), which is stored; returned pooled over neighbours
    where there is nothing stored yet, since slot order is token order there.
    """
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    real = index < tail_len
    own = tl.load(mass + base + index, mask=real, other=0.0)
    at = slots + (program // HEADS).to(tl.int64) * max_tail + index
    place = tl.load(at, mask=real, other=0) * HEADS + program % HEADS
    history = tl.load(score_blocks + place, mask=real & (index < stateful_len), other=0.0)
    own = tl.maximum(own, decay * history)
    tl.store(stored + base + index, own, mask=real)
    if stateful_len == 0:
        for step in tl.static_range(-REACH, REACH + 1):
            near = index + step
            there = (near >= 0) & (near < tail_len)
            own = tl.maximum(own, tl.load(mass + base + near, mask=there, other=0.0))
    return own
