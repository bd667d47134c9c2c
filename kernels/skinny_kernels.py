"""Device code of `skinny.py`: weight tiles streamed once, times all the rows of a decode batch.

The weight tile is the first operand of the product, so the tensor cores' long axis runs along the
weight's rows, and the batch's rows are the short one.
Knows nothing of launches or of how tiles are chosen.
"""

import os

import triton
import triton.language as tl

from zipage_lang.kernels.dependent_launch import release_successor, wait_for_predecessor

LINE = tl.constexpr(64)  # 16-bit elements in a line of 128 bytes
GROUP = tl.constexpr(8)  # rows of gate, then as many of up: an accumulator's thread holds both
# Triton's interpreter holds bfloat16 as integers and would multiply those.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _prefetch_tile(
    weight,
    first,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Ask for COLUMNS of the tile's rows in L2; waits for nothing."""
    rows = tl.minimum(first + tl.arange(0, COUNT), N - 1).to(tl.int64)
    columns = tl.minimum(column + tl.arange(0, COLUMNS // LINE) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight + rows[:, None] * K + columns[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_tile(
    tiles,
    source,
    first,
    column,
    num_rows,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """[COUNT, BLOCK_K]; rows past num_rows are zero or copies of the last: nobody stores them."""
    if TMA:
        tile = tiles.load([first, column])
    else:
        rows = tl.minimum(first + tl.arange(0, COUNT), num_rows - 1).to(tl.int64)
        columns = column + tl.arange(0, BLOCK_K)
        at = source + rows[:, None] * K + columns[None, :]
        if K % BLOCK_K == 0:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(columns < K)[None, :], other=0.0)
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store_tile(
    total,
    bias,
    out,
    split,
    first,
    num_rows,
    N: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    if HAS_BIAS:
        columns = first + tl.arange(0, COUNT)
        # the other splits' sums must not add it again
        added = tl.load(bias + columns, mask=columns < tl.where(split == 0, N, 0), other=0.0)
        total += added.to(tl.float32)[:, None]
    if GATED:
        pairs = total.reshape(COUNT // (2 * GROUP), 2, GROUP, ROWS).permute(0, 2, 3, 1)
        gate, up = pairs.split()  # [COUNT / (2 * GROUP), GROUP, ROWS]
        result = tl.reshape(gate * tl.sigmoid(gate) * up, (COUNT // 2, ROWS))
        columns = first // 2 + tl.arange(0, COUNT // 2)
    else:
        result = total
        columns = first + tl.arange(0, COUNT)
    width: tl.constexpr = N // 2 if GATED else N
    rows = tl.arange(0, ROWS)
    at = (split * num_rows + rows).to(tl.int64)[:, None] * width + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tl.store(out + at, tl.trans(result.to(out.dtype.element_ty)), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    weight_tiles,
    tail_tiles,
    x_tiles,
    weight,
    x,
    bias,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N + TAIL_N rows of the weight, times ROWS of x, over one split of K."""
    split = tl.program_id(1)
    first = tl.program_id(0) * (BLOCK_N + TAIL_N)
    num_steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    begin = split * num_steps // SPLITS
    end = (split + 1) * num_steps // SPLITS
    if PREFETCH > 0:
        _prefetch_tile(weight, first, begin * BLOCK_K, N, K, BLOCK_N, PREFETCH)
    release_successor(PDL)
    wait_for_predecessor(PDL)
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    if TAIL_N > 0:
        tail_total = tl.zeros((TAIL_N, ROWS), dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        at = step * BLOCK_K
        tile = _load_tile(weight_tiles, weight, first, at, N, K, BLOCK_N, BLOCK_K, TMA)
        columns = _load_tile(x_tiles, x, 0, at, num_rows, K, ROWS, BLOCK_K, TMA).trans()
        if TAIL_N > 0:
            tail = _load_tile(tail_tiles, weight, first + BLOCK_N, at, N, K, TAIL_N, BLOCK_K, TMA)
            tail_total = tl.dot(tail, columns, tail_total)
        total = tl.dot(tile, columns, total)
    _store_tile(total, bias, out, split, first, num_rows, N, BLOCK_N, ROWS, HAS_BIAS, GATED)
    if TAIL_N > 0:
        first += BLOCK_N
        _store_tile(tail_total, bias, out, split, first, num_rows, N, TAIL_N, ROWS, HAS_BIAS, GATED)


@triton.jit
def sum_partials_kernel(
    partials, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    release_successor(PDL)
    wait_for_predecessor(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    total = tl.load(partials + index, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * size + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)
