"""Triton range of values: one pass over the values of a tail.

Knows nothing of policies. What it means stands at its twin in `kernels/reference/ranges.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_NUMBERS = 4096  # of a tile: 32 values of 128 dimensions, 32 numbers a thread


def value_range(kv_blocks: Tensor, slots: Tensor) -> Tensor:
    """See the twin. Reads each value once, writes 4 bytes a slot and head.

    A program takes a tile of a row's slots in one head; neighbouring programs take its other heads,
    whose values lie beside.
    """
    assert kv_blocks.is_contiguous(), f"pool of strides {kv_blocks.stride()}"
    assert slots.is_contiguous(), f"slots of strides {slots.stride()}"
    assert slots.dtype == torch.int64, f"slots in {slots.dtype}"
    _, _, block_size, num_kv_heads, head_dim = kv_blocks.shape
    num_rows, max_tail = slots.shape
    shape = (num_rows, num_kv_heads, max_tail)
    found = torch.empty(shape, dtype=torch.float32, device=slots.device)
    padded = triton.next_power_of_2(head_dim)
    tile = max(_TILE_NUMBERS // padded, 1)
    num_tiles = triton.cdiv(max_tail, tile)
    _range_kernel[(num_rows * num_tiles * num_kv_heads,)](
        kv_blocks,
        slots,
        found,
        max_tail,
        num_tiles,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        DIM=head_dim,
        DIM_PADDED=padded,
        TILE=tile,
        num_warps=4,
    )
    return found


@triton.jit(do_not_specialize=["max_tail", "num_tiles"])
def _range_kernel(
    kv,
    slots,
    found,
    max_tail,
    num_tiles,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    row = (tile // num_tiles).to(tl.int64)
    index = tile % num_tiles * TILE + tl.arange(0, TILE)
    inside = index < max_tail
    slot = tl.load(slots + row * max_tail + index, mask=inside, other=-1)
    real = slot >= 0
    slot = tl.where(real, slot, 0)
    line = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + BLOCK_SIZE + slot % BLOCK_SIZE
    dims = tl.arange(0, DIM_PADDED)
    where = (line * HEADS + head)[:, None] * DIM + dims[None, :]
    there = real[:, None] & (dims < DIM)[None, :]
    values = tl.load(kv + where, mask=there, other=0.0).to(tl.float32)
    most = tl.max(tl.where(there, values, -float("inf")), axis=1)
    least = tl.min(tl.where(there, values, float("inf")), axis=1)
    place = (row * HEADS + head) * max_tail + index
    tl.store(found + place, tl.where(real, most - least, 0.0), mask=inside)
