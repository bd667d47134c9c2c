"""Attention over a row's own slots and over the prefix it shares, made one: a Triton kernel.

Same act as `reference/merge.py`. The launch neither waits for the device nor depends on the data.
Knows nothing of which rows share what, or how the two parts were computed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.dependent_launch import (
    launch_options,
    release_successor,
    wait_for_predecessor,
)

_HEADS_PER_PROGRAM = 8  # 1,024 elements at head_dim 128: 16 bytes of bf16 a thread at 4 warps


@triton.jit
def merge_parts_kernel(
    out,
    lse,
    has_shared,
    lse_out,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_successor(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(PDL)  # by every program: else the successor could overtake attention
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    own_lse = lse + row * NUM_HEADS + heads
    a = tl.load(own_lse, mask=is_head, other=0.0)
    merged_lse = a
    if tl.load(has_shared + row) != 0:
        columns = tl.arange(0, COLUMNS)
        is_element = is_head[:, None] & (columns < HEAD_DIM)[None, :]
        own_out = out + (row * NUM_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
        shared_row = num_rows * NUM_HEADS
        b = tl.load(own_lse + shared_row, mask=is_head, other=0.0)
        own = tl.load(own_out, mask=is_element, other=0.0).to(tl.float32)
        shared = tl.load(own_out + shared_row * HEAD_DIM, mask=is_element, other=0.0).to(tl.float32)
        top = tl.maximum(a, b)
        own_weight, shared_weight = tl.exp2(a - top), tl.exp2(b - top)
        total = own_weight + shared_weight
        merged = own * (own_weight / total)[:, None] + shared * (shared_weight / total)[:, None]
        tl.store(own_out, merged, mask=is_element)
        merged_lse = top + tl.log2(total)
    tl.store(lse_out + row * NUM_HEADS + heads, merged_lse, mask=is_head)


def merge_parts(out: Tensor, lse: Tensor, has_shared: Tensor, lse_out: Tensor) -> None:
    """Merge the second half of the rows into the first, where a row has a shared part.

    Moves three times the elements of each such row, and of the others the log-sum-exps alone.

    Args:
        out: [2 * num_rows, num_heads, head_dim], contiguous; merged in place.
        lse: float32 [2 * num_rows, num_heads], contiguous, base 2.
        has_shared: int32 [num_rows], contiguous.
        lse_out: float32 [num_rows, num_heads], contiguous; gets every row's log-sum-exps. Memory of
            its own: threads that share a head would else race.
    """
    num_rows, (num_heads, head_dim) = len(has_shared), out.shape[1:]
    assert len(out) == 2 * num_rows, (out.shape, num_rows)
    assert lse.shape == out.shape[:2], (lse.shape, out.shape)
    assert lse_out.shape == (num_rows, num_heads), (lse_out.shape, out.shape)
    assert lse.dtype == lse_out.dtype == torch.float32, (lse.dtype, lse_out.dtype)
    assert has_shared.dtype == torch.int32, has_shared.dtype
    for tensor in (out, lse, has_shared, lse_out):
        assert tensor.is_contiguous(), tensor.stride()
    tile = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    merge_parts_kernel[(num_rows, triton.cdiv(num_heads, tile))](
        out,
        lse,
        has_shared,
        lse_out,
        num_rows,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=tile,
        COLUMNS=triton.next_power_of_2(head_dim),
        num_warps=4,
        **launch_options(out.device),
    )
