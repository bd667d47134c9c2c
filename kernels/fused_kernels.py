"""Device code of `fused_ops.py`: norms, rotary embedding, gated activation, attention inputs.

Knows nothing of launches; what each act means stands at its twin in `reference/fused_ops.py`.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.dependent_launch import release_successor, wait_for_predecessor


@triton.jit
def _normed(wide, scales, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    return (wide * scale).to(dtype).to(tl.float32) * scales


@triton.jit
def _load_scales(weight, columns, in_row, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        return tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    else:
        return tl.full(columns.shape, 1.0, tl.float32)


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    eps,
    outer_stride,
    inner_stride,
    num_inner,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    release_successor(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = (row // num_inner) * outer_stride + (row % num_inner) * inner_stride
    columns = tl.arange(0, BLOCK)
    in_row = columns < SIZE
    scales = _load_scales(weight, columns, in_row, HAS_WEIGHT)
    wait_for_predecessor(PDL)
    wide = tl.load(x + start + columns, mask=in_row, other=0.0).to(tl.float32)
    normed = _normed(wide, scales, eps, SIZE, out.dtype.element_ty)
    tl.store(out + row * SIZE + columns, normed, mask=in_row)


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed_out,
    total_out,
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    release_successor(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    in_row = columns < SIZE
    scales = _load_scales(weight, columns, in_row, HAS_WEIGHT)
    wait_for_predecessor(PDL)
    kept = tl.load(residual + token * residual_stride + columns, mask=in_row, other=0.0)
    added = tl.load(x + token * x_stride + columns, mask=in_row, other=0.0)
    total = (added.to(tl.float32) + kept.to(tl.float32)).to(total_out.dtype.element_ty)
    tl.store(total_out + token * SIZE + columns, total, mask=in_row)
    normed = _normed(total.to(tl.float32), scales, eps, SIZE, normed_out.dtype.element_ty)
    tl.store(normed_out + token * SIZE + columns, normed, mask=in_row)


@triton.jit
def _load_halves(start, heads, head_stride, is_head, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    columns = tl.arange(0, HALF)
    mask = is_head[:, None] & (columns < HEAD_DIM // 2)[None, :]
    at = start + heads[:, None] * head_stride + columns[None, :]
    low = tl.load(at, mask=mask, other=0.0)
    high = tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0)
    return low, high


@triton.jit
def _store_halves(start, heads, is_head, low, high, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    columns = tl.arange(0, HALF)
    mask = is_head[:, None] & (columns < HEAD_DIM // 2)[None, :]
    at = start + heads[:, None] * HEAD_DIM + columns[None, :]
    tl.store(at, low, mask=mask)
    tl.store(at + HEAD_DIM // 2, high, mask=mask)


@triton.jit
def _norm_halves(low, high, weight, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    columns = tl.arange(0, HALF)
    in_half = columns < HEAD_DIM // 2
    low_weight = tl.load(weight + columns, mask=in_half, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + HEAD_DIM // 2 + columns, mask=in_half, other=0.0).to(tl.float32)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    normed_low = (wide_low * scale).to(low.dtype).to(tl.float32) * low_weight[None, :]
    normed_high = (wide_high * scale).to(low.dtype).to(tl.float32) * high_weight[None, :]
    return normed_low.to(low.dtype), normed_high.to(low.dtype)


@triton.jit
def _rotate(low, high, cos, sin, token, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    columns = tl.arange(0, HALF)
    in_half = columns < HEAD_DIM // 2
    at = token * (HEAD_DIM // 2) + columns
    c = tl.load(cos + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    return wide_low * c - wide_high * s, wide_high * c + wide_low * s


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    release_successor(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    start = x + token * token_stride
    low, high = _load_halves(start, heads, head_stride, is_head, HEAD_DIM, HALF)
    low, high = _rotate(low, high, cos, sin, token, HEAD_DIM, HALF)
    start = out + token * NUM_HEADS * HEAD_DIM
    _store_halves(start, heads, is_head, low, high, HEAD_DIM, HALF)


@triton.jit
def qk_norm_rope_store_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    q_out,
    pool,
    slots,
    ring,
    ring_slots,
    qkv_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RING: tl.constexpr,
    PDL: tl.constexpr,
):
    release_successor(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = qkv + token * qkv_stride
    if group < tl.cdiv(NUM_Q_HEADS, HEADS):
        if HAS_RING:
            entry = tl.load(ring_slots + token)  # early: hides its latency
        heads = group * HEADS + tl.arange(0, HEADS)
        is_head = heads < NUM_Q_HEADS
        low, high = _load_halves(row, heads, HEAD_DIM, is_head, HEAD_DIM, HALF)
        if HAS_NORM:
            low, high = _norm_halves(low, high, q_weight, eps, HEAD_DIM, HALF)
        q_low, q_high = _rotate(low, high, cos, sin, token, HEAD_DIM, HALF)
        start = q_out + token * NUM_Q_HEADS * HEAD_DIM
        _store_halves(start, heads, is_head, q_low, q_high, HEAD_DIM, HALF)
        if HAS_RING:
            is_kept = heads < tl.where(entry >= 0, NUM_Q_HEADS, 0)
            start = ring + entry * NUM_Q_HEADS * HEAD_DIM
            _store_halves(start, heads, is_kept, q_low, q_high, HEAD_DIM, HALF)
    else:
        slot = tl.load(slots + token)
        heads = (group - tl.cdiv(NUM_Q_HEADS, HEADS)) * HEADS + tl.arange(0, HEADS)
        is_head = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        keys = row + NUM_Q_HEADS * HEAD_DIM
        low, high = _load_halves(keys, heads, HEAD_DIM, is_head, HEAD_DIM, HALF)
        values = keys + NUM_KV_HEADS * HEAD_DIM
        v_low, v_high = _load_halves(values, heads, HEAD_DIM, is_head, HEAD_DIM, HALF)
        if HAS_NORM:
            low, high = _norm_halves(low, high, k_weight, eps, HEAD_DIM, HALF)
        k_low, k_high = _rotate(low, high, cos, sin, token, HEAD_DIM, HALF)
        # a block holds BLOCK_SIZE rows of keys, then as many of values
        key_row = slot + (slot // BLOCK_SIZE) * BLOCK_SIZE
        start = pool + key_row * NUM_KV_HEADS * HEAD_DIM
        _store_halves(start, heads, is_head, k_low, k_high, HEAD_DIM, HALF)
        start = pool + (key_row + BLOCK_SIZE) * NUM_KV_HEADS * HEAD_DIM
        _store_halves(start, heads, is_head, v_low, v_high, HEAD_DIM, HALF)


@triton.jit
def silu_mul_kernel(
    gate_up, out, row_stride, size, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """GROUP: columns of gate that stand before as many of up; 0 where all of them do."""
    release_successor(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < size
    row = gate_up + token * row_stride
    if GROUP == 0:
        gates, ups = row + columns, row + size + columns
    else:
        gates = row + (columns // GROUP) * (2 * GROUP) + columns % GROUP
        ups = gates + GROUP
    gate = tl.load(gates, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(ups, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, gate * tl.sigmoid(gate) * up, mask=in_row)
