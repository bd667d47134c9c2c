"""Triton hole filling: K, V and slot state of all rows, that is of all layers, in two launches.

Knows nothing of scores or of who owns which block. What it means stands at its twin in
`kernels/reference/compact.py`.

The first launch (one program per row and head) numbers movers and holes by prefix sums and writes
the slot state; the second moves K and V, many programs per row and head. Between them lie the
moves: int32 [num_rows, num_kv_heads, 3, most_moves], the movers' slots, the holes' slots and the
movers' indices in the tail; and how many there are, int32 [num_rows, num_kv_heads].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.dependent_launch import launch_options, wait_for_predecessor
from zipage_lang.kernels.select import row_config

_PAIRS = 32  # slots copied at a time: 8 KiB of bfloat16 keys and as much of values
_SHARES = 8  # programs that share the moves of a row and head: 256 moves at once


class Moves(NamedTuple):
    """Scratch between the two launches."""

    pairs: Tensor  # int32 [num_rows, num_kv_heads, 3, most_moves]
    counts: Tensor  # int32 [num_rows, num_kv_heads]


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
    """See the twin. 2 * 2 * head_dim elements per moved slot and head, and 17 to 25 bytes of state
    per slot and head.

    That as many slots are kept as `num_keep` says is the caller's word: checking it would stop the
    host.
    """
    _check(kv_blocks, score_blocks, position_blocks, slots, keep, positions)
    num_rows, num_kv_heads, max_tail = keep.shape
    moves = empty_moves(num_rows, num_kv_heads, max_tail, keep.device)
    _place_kernel[(num_rows * num_kv_heads,)](
        score_blocks,
        position_blocks,
        slots,
        keep.view(torch.int8),
        num_keep,
        positions,
        positions if scores is None else scores.contiguous(),
        *moves,
        max_tail,
        moves.pairs.shape[3],
        WITH_SCORES=scores is not None,
        HEADS=num_kv_heads,
        **row_config(max_tail),
    )
    carry_out(kv_blocks, moves)


def empty_moves(num_rows: int, num_kv_heads: int, max_tail: int, device: torch.device) -> Moves:
    """Room for any moves: no more movers than half the tail have as many holes before them."""
    most = max_tail // 2 + 1
    pairs = torch.empty((num_rows, num_kv_heads, 3, most), dtype=torch.int32, device=device)
    return Moves(pairs, torch.empty((num_rows, num_kv_heads), dtype=torch.int32, device=device))


def carry_out(kv_blocks: Tensor, moves: Moves) -> None:
    """Copy K and V of every mover into its hole."""
    num_rows, num_kv_heads, _, most = moves.pairs.shape
    _, _, block_size, _, head_dim = kv_blocks.shape
    _move_kernel[(num_rows * num_kv_heads * _SHARES,)](
        kv_blocks,
        *moves,
        most,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        PAIRS=_PAIRS,
        SHARES=_SHARES,
        num_warps=4,
        **launch_options(kv_blocks.device),
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
    num_slots = kv_blocks.shape[0] * kv_blocks.shape[2]
    assert num_slots < 2**31, f"{num_slots} slots of all layers do not fit 32-bit numbers"
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


@triton.jit(do_not_specialize=["max_tail", "most"])
def _place_kernel(
    score_blocks,
    position_blocks,
    slots,
    keep,
    num_keep,
    positions,
    scores,
    pairs,
    counts,
    max_tail,
    most,
    WITH_SCORES: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0)
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    is_kept = tl.load(keep + base + index, mask=index < max_tail, other=0) != 0
    place_kept(
        is_kept, score_blocks, position_blocks, slots, num_keep, positions, scores, pairs, counts,
        max_tail, most, WITH_SCORES, HEADS, SLOTS,
    )  # fmt: skip


@triton.jit
def place_kept(
    is_kept,
    score_blocks,
    position_blocks,
    slots,
    num_keep,
    positions,
    scores,
    pairs,
    counts,
    max_tail,
    most,
    WITH_SCORES: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """A program's row and head: its moves, and the state of its kept slots as it will lie."""
    program = tl.program_id(0)
    row = (program // HEADS).to(tl.int64)
    head = program % HEADS
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    movers = pairs + program.to(tl.int64) * (3 * most)
    holes = movers + most
    sources = holes + most
    slot = tl.load(slots + row * max_tail + index, mask=index < max_tail, other=0)
    front = index < tl.load(num_keep + row).to(tl.int32)
    is_mover = is_kept & (front == 0)
    is_hole = front & (is_kept == 0)
    mover_rank, hole_rank = _ranks(is_mover, is_hole, SLOTS)
    is_mover = is_mover & (mover_rank < most)
    is_hole = is_hole & (hole_rank < most)
    tl.store(movers + mover_rank, slot.to(tl.int32), mask=is_mover)
    tl.store(sources + mover_rank, index, mask=is_mover)
    tl.store(holes + hole_rank, slot.to(tl.int32), mask=is_hole)
    tl.store(counts + program, tl.sum(is_hole.to(tl.int32), axis=0))
    tl.debug_barrier()  # what one thread wrote, another reads; and all old state is read
    source = tl.load(sources + hole_rank, mask=is_hole, other=0)
    source = tl.where(is_hole, source, index)
    place = slot * HEADS + head
    position = tl.load(positions + base + source, mask=front, other=0)
    tl.store(position_blocks + place, position, mask=front)
    if WITH_SCORES:
        score = tl.load(scores + base + source, mask=front, other=0.0)
        tl.store(score_blocks + place, score, mask=front)


@triton.jit
def _ranks(first, second, SLOTS: tl.constexpr):
    """How many of each kind lie before a slot. int32 [SLOTS] each; in one scan, as halves of a
    number: no more than SLOTS - 1 lie before one that is of the kind itself."""
    first, second = first.to(tl.int32), second.to(tl.int32)
    if SLOTS < 2**15:
        both = tl.cumsum(first + (second << 16), axis=0)
        return (both & 0xFFFF) - first, (both >> 16) - second
    both = tl.cumsum(first.to(tl.int64) + (second.to(tl.int64) << 32), axis=0)
    return (both & 0xFFFF_FFFF).to(tl.int32) - first, (both >> 32).to(tl.int32) - second


@triton.jit(do_not_specialize=["most"])
def _move_kernel(
    kv,
    pairs,
    counts,
    most,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every SHARES-th run of PAIRS moves of a row and head."""
    wait_for_predecessor(PDL)
    share = tl.program_id(0) % SHARES
    program = tl.program_id(0) // SHARES
    head = program % HEADS
    movers = pairs + program.to(tl.int64) * (3 * most)
    holes = movers + most
    num_moves = tl.load(counts + program)
    dims = tl.arange(0, DIM_PADDED)
    part = BLOCK_SIZE * HEADS * DIM  # from a key to its value
    for first in range(share * PAIRS, num_moves, SHARES * PAIRS):
        pair = first + tl.arange(0, PAIRS)
        there = pair < num_moves
        source = tl.load(movers + pair, mask=there, other=0).to(tl.int64)
        target = tl.load(holes + pair, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & (dims < DIM)[None, :]
        read = kv + _line_of(source, head, BLOCK_SIZE, HEADS, DIM)[:, None] + dims[None, :]
        write = kv + _line_of(target, head, BLOCK_SIZE, HEADS, DIM)[:, None] + dims[None, :]
        moved_key = tl.load(read, mask=mask, other=0.0)
        moved_value = tl.load(read + part, mask=mask, other=0.0)
        tl.store(write, moved_key, mask=mask)
        tl.store(write + part, moved_value, mask=mask)


@triton.jit
def _line_of(slot, head, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Offset of a slot's key of one head, in elements of the pool."""
    line = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
    return (line * HEADS + head) * DIM
