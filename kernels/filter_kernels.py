"""Device code of the filtered draw: searches for edges in the order of the likeliest tokens.

Knows nothing of launches; what the draw means stands at its twin in `reference/sampling.py`.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.sampling_kernels import (
    WEIGHT_ONE,
    ceil_of,
    line_peak,
    scale_of,
    weights_of,
)

NO_WEIGHT = tl.constexpr(28.0)  # exp(-28) * 2^40 is below 1


@triton.jit
def _keys(x):
    """int32 that orders as the floats do; both zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key_value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(row, start, vocab_size, best, scale, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of a tile and what each token counts for; columns past the end count for nothing."""
    columns = start + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    x = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
    measure = mask.to(tl.int64) if BY_COUNT else weights_of(x, best, scale)
    return _keys(x), measure


@triton.jit
def _edge_key(
    row,
    vocab_size,
    best,
    scale,
    low,
    high,
    need,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The largest key in [low, high] such that all tokens from it up measure `need` or more.

    `low` where none does. Each pass divides what is left of the range into LANES parts.
    """
    lanes = tl.arange(0, LANES)
    low = low.to(tl.int64)
    span = high.to(tl.int64) - low + 1
    while span > 1:
        step = (span + LANES - 1) // LANES
        thresholds = tl.minimum(low + lanes * step, 0x7FFFFFFF).to(tl.int32)
        sums = tl.zeros((BLOCK, LANES), dtype=tl.int64)
        for start in range(0, vocab_size, BLOCK):
            keys, measure = _load_keys(row, start, vocab_size, best, scale, BY_COUNT, BLOCK)
            is_up = keys[:, None] >= thresholds[None, :]
            sums += tl.where(is_up, measure[:, None], 0)
        num_reach = tl.sum((tl.sum(sums, axis=0) >= need).to(tl.int64), axis=0)
        lane = tl.maximum(num_reach - 1, 0)
        low += lane * step
        span = tl.minimum(step, span - lane * step)
    return low.to(tl.int32)


@triton.jit
def _above(row, vocab_size, best, scale, key, floor, BLOCK: tl.constexpr):
    """Count and weight of the tokens above a key, and weight of all that weigh `floor` or more."""
    counts = tl.zeros((BLOCK,), dtype=tl.int64)
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    floor_sums = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, vocab_size, BLOCK):
        keys, weights = _load_keys(row, start, vocab_size, best, scale, False, BLOCK)
        counts += (keys > key).to(tl.int64)
        sums += tl.where(keys > key, weights, 0)
        floor_sums += tl.where(weights >= floor, weights, 0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0), tl.sum(floor_sums, axis=0)


@triton.jit
def _token_of_key(row, vocab_size, key, index, BLOCK: tl.constexpr):
    """Among the tokens of one key, by id, number `index`; the last if there are fewer."""
    token = vocab_size - 1
    seen = index * 0
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        x = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
        is_key = (mask & (_keys(x) == key)).to(tl.int64)
        rank = seen + tl.cumsum(is_key, axis=0) - 1
        hit = tl.max(tl.where((is_key != 0) & (rank <= index), columns, -1), axis=0)
        token = tl.where(hit >= 0, hit, token)
        seen += tl.sum(is_key, axis=0)
    return token


@triton.jit
def draw_filtered_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    peaks,
    token_ids,
    row_stride,
    vocab_size,
    num_tiles,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SKIP_UNFILTERED: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    heat, k, p = tl.load(temperature + line), tl.load(top_k + line), tl.load(top_p + line)
    best = line_peak(peaks, line, num_tiles, TILES)
    heat = tl.where(best == best, heat, 0.0)  # a line with NaN has no order
    if SKIP_UNFILTERED:
        heat = tl.where(k < vocab_size, heat, tl.where(p < 1.0, heat, 0.0))
    if heat > 0:
        row = logits + line * row_stride
        scale = scale_of(heat)
        high = _keys(best)
        # what lies below weighs nothing; the second term outlasts the rounding of the first
        low = _keys(best - NO_WEIGHT * scale - tl.abs(best) * 1e-6)
        floor = ceil_of(tl.load(min_p + line) * WEIGHT_ONE)
        edge = low
        if k < vocab_size:
            edge = _edge_key(row, vocab_size, best, scale, low, high, k, True, BLOCK, LANES)
        count, total, floor_total = _above(row, vocab_size, best, scale, edge, floor, BLOCK)
        total += (k - count) * weights_of(_key_value(edge), best, scale)
        if p < 1.0:
            need = ceil_of(p * total.to(tl.float64))
            need = tl.maximum(tl.minimum(need, total), 1)
            edge = _edge_key(row, vocab_size, best, scale, edge, high, need, False, BLOCK, LANES)
            _, above, _ = _above(row, vocab_size, best, scale, edge, floor, BLOCK)
            weight = tl.maximum(weights_of(_key_value(edge), best, scale), 1)
            total = above + (need - above + weight - 1) // weight * weight
        total = tl.minimum(total, floor_total)
        target = (tl.load(uniform + line) * total.to(tl.float64)).to(tl.int64)
        key = _edge_key(row, vocab_size, best, scale, edge, high, target + 1, False, BLOCK, LANES)
        _, above, _ = _above(row, vocab_size, best, scale, key, floor, BLOCK)
        weight = tl.maximum(weights_of(_key_value(key), best, scale), 1)
        index = (target - above) // weight
        token = _token_of_key(row, vocab_size, key, index, BLOCK)
        tl.store(token_ids + line, token.to(tl.int64))
    elif not SKIP_UNFILTERED:
        tl.store(token_ids + line, 0)
