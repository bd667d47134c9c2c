"""Triton hole filling: K, V and slot state of all rows, that is of all layers, in one launch.

Knows nothing of scores or of who owns which block. What it means stands at its twin in
`kernels/reference/compact.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS_PER_WARP = 512
_PAIRS = (
    32  # slots copied at a time: 8 KiB of bfloat16 keys, 16 bytes in flight per thread and more
)


def fill_holes(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    slots: Tensor,
    keep: Tensor,
    num_keep: Tensor,
    positions: Tensor,
    scores: Tensor | None,
) -> None:
    """See the twin. One program per row and head: 2 * 2 * head_dim elements per moved slot, and
    17 to 25 bytes of state per slot.

    Prefix sums number the movers and the holes; the numbered pairs pass through scratch of 4 bytes
    a slot and head. That as many slots are kept as `num_keep` says is the caller's word:
    checking it would stop the host.
    """
    _check(kv_blocks, score_blocks, position_blocks, slots, keep, positions)
    num_rows, num_kv_heads, max_tail = keep.shape
    num_slots = max(triton.next_power_of_2(max_tail), 16)
    half = max_tail // 2 + 1  # no more movers than this have as many holes before them
    pairs = torch.empty((num_rows, num_kv_heads, 2, half), dtype=torch.int32, device=keep.device)
    head_dim = kv_blocks.shape[4]
    _fill_kernel[(num_rows * num_kv_heads,)](
        kv_blocks,
        score_blocks,
        position_blocks,
        slots,
        keep.view(torch.int8),
        num_keep,
        positions,
        positions if scores is None else scores.contiguous(),
        pairs,
        max_tail,
        half,
        WITH_SCORES=scores is not None,
        BLOCK_SIZE=kv_blocks.shape[2],
        HEADS=num_kv_heads,
        DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        SLOTS=num_slots,
        PAIRS=_PAIRS,
        num_warps=min(max(num_slots // _SLOTS_PER_WARP, 1), 16),
    )


def _check(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    slots: Tensor,
    keep: Tensor,
    positions: Tensor,
) -> None:
    pools = (kv_blocks, score_blocks, position_blocks)
    assert all(pool.is_contiguous() for pool in pools), "pools are indexed as contiguous"
    state = (kv_blocks.shape[0], kv_blocks.shape[2], kv_blocks.shape[3])
    assert tuple(position_blocks.shape) == state, f"state {position_blocks.shape}, not {state}"
    assert tuple(score_blocks.shape) == state, f"state {score_blocks.shape}, not {state}"
    assert slots.dtype == torch.int64, f"slots in {slots.dtype}"
    assert slots.is_contiguous(), f"slots in {slots.dtype}"
    assert keep.dtype == torch.bool, f"keep in {keep.dtype}"
    assert keep.is_contiguous(), f"keep in {keep.dtype}"
    assert positions.shape == keep.shape, f"{positions.shape}"
    assert positions.is_contiguous(), f"{positions.shape}"
    assert score_blocks.dtype == torch.float32, f"scores in {score_blocks.dtype}"
    assert position_blocks.dtype == positions.dtype == torch.int32, f"{positions.dtype}"


@triton.jit
def _fill_kernel(
    kv,
    score_blocks,
    position_blocks,
    slots,
    keep,
    num_keep,
    positions,
    scores,
    pairs,
    max_tail,
    half,
    WITH_SCORES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // HEADS).to(tl.int64)
    head = program % HEADS
    index = tl.arange(0, SLOTS)
    inside = index < max_tail
    base = program.to(tl.int64) * max_tail
    sources = pairs + program.to(tl.int64) * (2 * half)
    targets = sources + half
    is_kept = tl.load(keep + base + index, mask=inside, other=0) != 0
    front = index < tl.load(num_keep + row).to(tl.int32)
    is_mover = is_kept & inside & (front == 0)
    is_hole = front & (is_kept == 0)
    mover_rank = tl.cumsum(is_mover.to(tl.int32), axis=0) - 1
    hole_rank = tl.cumsum(is_hole.to(tl.int32), axis=0) - 1
    tl.store(sources + mover_rank, index, mask=is_mover & (mover_rank < half))
    tl.store(targets + hole_rank, index, mask=is_hole & (hole_rank < half))
    tl.debug_barrier()  # what one thread wrote, another reads
    source = tl.load(sources + hole_rank, mask=is_hole & (hole_rank < half), other=0)
    source = tl.where(is_hole, source, index)
    place = tl.load(slots + row * max_tail + index, mask=front, other=0) * HEADS + head
    tl.store(
        position_blocks + place, tl.load(positions + base + source, mask=front, other=0), mask=front
    )
    if WITH_SCORES:
        score = tl.load(scores + base + source, mask=front, other=0.0)
        tl.store(score_blocks + place, score, mask=front)
    num_pairs = tl.minimum(tl.sum(is_hole.to(tl.int32), axis=0), half)
    dims = tl.arange(0, DIM_PADDED)
    part = BLOCK_SIZE * HEADS * DIM  # from a key to its value
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        there = pair < num_pairs
        source_slot = tl.load(
            slots + row * max_tail + tl.load(sources + pair, mask=there, other=0),
            mask=there,
            other=0,
        )
        target_slot = tl.load(
            slots + row * max_tail + tl.load(targets + pair, mask=there, other=0),
            mask=there,
            other=0,
        )
        mask = there[:, None] & (dims < DIM)[None, :]
        read = kv + _line_of(source_slot, head, BLOCK_SIZE, HEADS, DIM)[:, None] + dims[None, :]
        write = kv + _line_of(target_slot, head, BLOCK_SIZE, HEADS, DIM)[:, None] + dims[None, :]
        moved_key = tl.load(read, mask=mask, other=0.0)
        moved_value = tl.load(read + part, mask=mask, other=0.0)
        tl.store(write, moved_key, mask=mask)
        tl.store(write + part, moved_value, mask=mask)


@triton.jit
def _line_of(slot, head, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Offset of a slot's key of one head, in elements of the pool."""
    line = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
    return (line * HEADS + head) * DIM
