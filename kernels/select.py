"""Triton selection: protection by position, then the exact top K per row and head, without a sort.

Knows nothing of where a score comes from or how slots are moved. What each function means stands
at its twin in `kernels/reference/select.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS_PER_WARP = 256  # 8 of a thread's registers hold one number of each of its slots
_NO_POSITION = tl.constexpr(0x7FFF_FFFF)
_ALL_BUT_SIGN = tl.constexpr(0x7FFF_FFFF)
_LOWEST = tl.constexpr(-0x8000_0000)


def protect_slots(
    scores: Tensor,
    positions: Tensor,
    lens: Tensor,
    logical_lens: Tensor,
    num_recent: int,
    num_sinks: int,
) -> Tensor:
    """See the twin. One program per row and head; reads 8 bytes a slot and head, writes 4.

    Sinks are found by taking the minimum `num_sinks` times: meant for a few.
    """
    _check(scores, positions, lens)
    raised = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    num_rows, num_kv_heads, max_tail = scores.shape
    _protect_kernel[(num_rows * num_kv_heads,)](
        scores,
        positions,
        lens,
        logical_lens,
        raised,
        max_tail,
        num_recent,
        num_sinks,
        HEADS=num_kv_heads,
        **row_config(max_tail),
    )
    return raised


def select_top_k(scores: Tensor, positions: Tensor, lens: Tensor, num_keep: Tensor) -> Tensor:
    """See the twin. One program per row and head; reads 8 bytes a slot and head, writes 1.

    Where the kept scores end is found bit by bit (some 20 counts over the tail, which stays in
    registers, 32 at most); where more slots have just that score than may be kept, the K-th
    position likewise.
    """
    _check(scores, positions, lens)
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    num_rows, num_kv_heads, max_tail = scores.shape
    _select_kernel[(num_rows * num_kv_heads,)](
        scores,
        positions,
        lens,
        num_keep,
        keep.view(torch.int8),
        max_tail,
        HEADS=num_kv_heads,
        **row_config(max_tail),
    )
    return keep


def row_config(max_tail: int) -> dict[str, int]:
    """A whole tail in the registers of one program: 8 warps to 2,048 slots, 16 from 4,096 on."""
    slots = max(triton.next_power_of_2(max_tail), 16)
    return {"SLOTS": slots, "num_warps": min(max(slots // _SLOTS_PER_WARP, 1), 16)}


def _check(scores: Tensor, positions: Tensor, lens: Tensor) -> None:
    assert scores.shape == positions.shape, f"scores {scores.shape}, positions {positions.shape}"
    assert scores.is_contiguous(), "rows must lie one after another"
    assert positions.is_contiguous(), "rows must lie one after another"
    assert scores.dtype == torch.float32, f"scores in {scores.dtype}"
    assert positions.dtype == torch.int32, f"positions in {positions.dtype}"
    assert lens.shape == scores.shape[:1], f"{lens.shape[0]} lengths for {scores.shape[0]} rows"
    assert lens.is_contiguous(), f"lengths of stride {lens.stride()}"


@triton.jit(do_not_specialize=["max_tail", "num_recent", "num_sinks"])
def _protect_kernel(
    scores,
    positions,
    lens,
    logical_lens,
    raised,
    max_tail,
    num_recent,
    num_sinks,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // HEADS
    index = tl.arange(0, SLOTS)
    inside = index < max_tail
    base = program.to(tl.int64) * max_tail
    real = index < tl.load(lens + row).to(tl.int32)
    at = tl.load(positions + base + index, mask=real, other=_NO_POSITION)
    first_recent = (tl.load(logical_lens + row) - num_recent).to(tl.int32)
    protected = is_protected(at, first_recent, num_sinks)
    score = tl.load(scores + base + index, mask=inside, other=0.0)
    tl.store(raised + base + index, tl.where(protected, float("inf"), score), mask=inside)


@triton.jit(do_not_specialize=["max_tail"])
def _select_kernel(
    scores,
    positions,
    lens,
    num_keep,
    keep,
    max_tail,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // HEADS
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    real = index < tl.load(lens + row).to(tl.int32)
    wanted = tl.load(num_keep + row).to(tl.int32)
    score = tl.load(scores + base + index, mask=real, other=0.0)
    at = tl.load(positions + base + index, mask=real, other=0)
    is_kept = kept_slots(score, at, real, wanted)
    tl.store(keep + base + index, is_kept.to(tl.int8), mask=index < max_tail)


@triton.jit
def is_protected(at, first_recent, num_sinks):
    """Recent ones and sinks, of positions that are the highest int32 where there is no slot."""
    last_sink = tl.min(at, axis=0) - 1  # nothing lies at or before it yet
    for _ in range(num_sinks):
        last_sink = tl.min(tl.where(at > last_sink, at, _NO_POSITION), axis=0)
    return (at >= first_recent) | (at <= last_sink)


@triton.jit
def kept_slots(score, at, real, wanted):
    """The `wanted` highest scores of the real slots; of equal ones the highest positions."""
    order = _order_of(score)
    threshold = _highest_with(order, real, wanted)
    above = real & (order > threshold)
    equal = real & (order == threshold)
    missing = wanted - tl.sum(above.to(tl.int32), axis=0)
    if tl.sum(equal.to(tl.int32), axis=0) > missing:
        equal = equal & (at >= _highest_with(at, equal, missing))
    return above | equal


@triton.jit
def _highest_with(values, real, wanted):
    """An int32 that just `wanted` of the real values reach; else the highest that more of them do,
    and where there are fewer the lowest of all.

    Found bit by bit from the top, which ends where the count is right: of distinct values after
    some 20 bits. Flipping the top bit of the lowest int32 gives 0; the lower bits are then set as
    in any number.
    """
    reached = tl.full((), _LOWEST, tl.int32)
    bit = tl.full((), 31, tl.int32)
    while bit >= 0:
        tried = reached ^ (tl.full((), 1, tl.int32) << bit)
        num_there = tl.sum((real & (values >= tried)).to(tl.int32), axis=0)
        reached = tl.where(num_there >= wanted, tried, reached)
        bit = tl.where(num_there == wanted, -1, bit - 1)
    return reached


@triton.jit
def _order_of(score):
    """int32 that orders as the float32 scores do; NaN as -inf, and both zeros alike."""
    score = tl.where(score != score, -float("inf"), score)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _ALL_BUT_SIGN)
