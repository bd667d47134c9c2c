"""Device code of strict mode: products and attention whose every row has the same bits anywhere.

One program owns a tile of fixed shape and adds along the shared axis from its start to its end;
nothing is split, and no tile's shape, warps or stages depend on how many rows there are. A masked
row or a slot behind a token's last adds zeros. Knows nothing of launches.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.score_kernels import INTERPRETED


@triton.jit
def _added(left, right, total):
    """left @ right + total in float32; products of 16-bit numbers are exact."""
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def row_product_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    IN_SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A tile of x @ weight.T + bias, float32 until it is stored."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row, is_column = rows < num_rows, columns < OUT_SIZE
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, IN_SIZE, DEPTH):
        at = start + depth
        in_row = at < IN_SIZE
        left = tl.load(
            x + rows[:, None] * IN_SIZE + at[None, :],
            mask=is_row[:, None] & in_row[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + columns[None, :] * IN_SIZE + at[:, None],
            mask=is_column[None, :] & in_row[:, None],
            other=0.0,
        )
        total = _added(left, right, total)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at_out = out + rows[:, None] * OUT_SIZE + columns[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["runs", "tables", "lse"],
)
def run_attention_kernel(
    q,
    layer_kv,
    runs,
    tables,
    out,
    lse,
    scale_log2,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """A run of one sequence's query tokens under one KV head, over all slots in their order."""
    run, kv_head = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(runs + 4 * run).to(tl.int64)
    num_tokens = tl.load(runs + 4 * run + 1)
    first_seen = tl.load(runs + 4 * run + 2)  # slots that the first token sees
    table = tables + tl.load(runs + 4 * run + 3).to(tl.int64) * table_stride
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    token = rows // GROUP
    is_row = token < num_tokens
    head = kv_head * GROUP + rows % GROUP
    at_q = (first_token + token) * NUM_Q_HEADS + head
    in_head = dims < HEAD_DIM
    mask = is_row[:, None] & in_head[None, :]
    queries = tl.load(q + at_q[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    seen = first_seen + tl.minimum(token, num_tokens - 1)
    end = first_seen + num_tokens - 1
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, end, TILE):
        slots = start + tl.arange(0, TILE)
        is_slot = slots < end
        block = tl.load(table + slots // BLOCK_SIZE, mask=is_slot, other=0).to(tl.int64)
        line = (block * 2 * BLOCK_SIZE + slots % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        at_keys = layer_kv + line[None, :] * HEAD_DIM + dims[:, None]
        keys = tl.load(at_keys, mask=is_slot[None, :] & in_head[:, None], other=0.0)
        scores = _added(queries, keys, tl.zeros((ROWS, TILE), tl.float32)) * scale_log2
        scores = tl.where(slots[None, :] < seen[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        line += BLOCK_SIZE * NUM_KV_HEADS  # a slot's value lies one block of keys behind its key
        at_values = layer_kv + line[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(at_values, mask=is_slot[:, None] & in_head[None, :], other=0.0)
        sums = _added(weights.to(values.dtype), values, sums * shrink[:, None])
        best = higher
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_q[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
    if HAS_LSE:
        tl.store(lse + at_q, best + tl.log2(total), mask=is_row)
