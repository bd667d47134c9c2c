"""Device code of the filtered draw: finds edges in the order of the likeliest tokens, no sort.

A search first narrows a window of logits until a list of the tokens in it is short, then searches
the list; all that decides is integers.
Knows nothing of launches; what the draw means stands at its twin in `reference/sampling.py`.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.draw_kernels import LOG2_E, is_drawn_in_order, line_peak, record
from zipage_lang.kernels.sampling_kernels import (
    WEIGHT_ONE,
    ceil_of,
    row_of,
    scale_of,
    setting_of,
    uniform_of,
    weights_of,
)
from zipage_lang.kernels.window_kernels import collect, keys_of, measure_from, narrow

NO_WEIGHT = tl.constexpr(28.0)  # exp(-28) * 2^40 is below 1
BY_COUNT, BY_WEIGHT, BY_ID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOP_K, TOP_P, PLACE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _entries(row, ids, is_list, at, num):
    """Entries of a list of tokens, or of the line itself: which are there, their ids and logits."""
    mask = at < num
    tokens = tl.load(ids + at, mask=at < tl.where(is_list, num, 0), other=0)
    tokens = tl.where(is_list, tokens, at)
    return mask, tokens, tl.load(row + tokens, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _edge(
    row,
    ids,
    is_list,
    num,
    best,
    scale,
    by,
    tied,
    low,
    high,
    need,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The largest key in [low, high] such that the entries from it up measure `need` or more.

    `low` where none does. BY_ID the key is minus the id; only entries of logit key `tied` count.
    """
    lanes = tl.arange(0, LANES)
    low = low.to(tl.int64)
    span = high.to(tl.int64) - low + 1
    while span > 1:
        step = (span + LANES - 1) // LANES
        thresholds = tl.minimum(low + lanes * step, 0x7FFFFFFF).to(tl.int32)
        sums = tl.zeros((BLOCK, LANES), dtype=tl.int64)
        for start in range(0, num, BLOCK):
            at = start + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1], as all of an entry
            mask, tokens, x = _entries(row, ids, is_list, at, num)
            keys = keys_of(x) >> SHIFT
            measure = tl.where(by == BY_WEIGHT, weights_of(x, best, scale), 1)
            measure = tl.where(tl.where(by == BY_ID, keys == tied, mask), measure, 0)
            is_up = tl.where(by == BY_ID, -tokens, keys) >= thresholds[None, :]  # [BLOCK, LANES]
            sums += tl.where(is_up & mask, measure, 0)
        num_reach = tl.sum((tl.sum(sums, axis=0) >= need).to(tl.int64), axis=0)
        lane = tl.maximum(num_reach - 1, 0)
        low += lane * step
        span = tl.minimum(step, span - lane * step)
    return low.to(tl.int32)


@triton.jit
def _above(
    row,
    ids,
    is_list,
    num,
    best,
    scale,
    key,
    floor,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the entries tell of a key.

    Count and weight of those above it, weight of all at `floor` or more; the logit of those with
    just this key, their lowest id and their highest.
    """
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    floor_sums = tl.zeros((BLOCK,), dtype=tl.int64)
    logits = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    first = tl.full((BLOCK,), 0x7FFFFFFF, dtype=tl.int32)
    last = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num, BLOCK):
        mask, tokens, x = _entries(row, ids, is_list, start + tl.arange(0, BLOCK), num)
        weights = tl.where(mask, weights_of(x, best, scale), 0)
        keys = keys_of(x) >> SHIFT
        is_above = mask & (keys > key)
        counts += is_above.to(tl.int32)
        sums += tl.where(is_above, weights, 0)
        floor_sums += tl.where(weights >= floor, weights, 0)
        is_tied = mask & (keys == key)
        logits = tl.where(is_tied, x, logits)
        first = tl.where(is_tied, tl.minimum(first, tokens), first)
        last = tl.where(is_tied, tl.maximum(last, tokens), last)
    count, above = tl.sum(counts, axis=0).to(tl.int64), tl.sum(sums, axis=0)
    ends = tl.min(first, axis=0), tl.max(last, axis=0)
    return count, above, tl.sum(floor_sums, axis=0), tl.max(logits, axis=0), ends[0], ends[1]


@triton.jit
def _lowest_of_top_p(best, scale, p, total, vocab_size):
    """What lies below weighs less than top-p leaves out, even if all of the vocabulary did."""
    left_out = (1.0 - p).to(tl.float32) * (total.to(tl.float32) / WEIGHT_ONE)
    return best + scale * tl.log(0.99 * left_out / vocab_size)


@triton.jit
def draw_filtered_kernel(
    logits,
    rows,
    seeds,
    num_generated,
    temperature,
    top_k,
    top_p,
    min_p,
    last_token_ids,
    uniform,
    peaks,
    sums,
    ids,
    num_listed,
    drawn,
    row_stride,
    vocab_size,
    num_tiles,
    FILTERS: tl.constexpr,
    SHIFT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    PIVOTS: tl.constexpr,
    SWEEP_BLOCK: tl.constexpr,
    COLLECT_BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row_index = row_of(rows, line)
    heat = setting_of(temperature, row_index, 0.0)
    best = line_peak(peaks, line, num_tiles, TILES)
    if is_drawn_in_order(heat, best, top_k, top_p, row_index, vocab_size, FILTERS):
        k = setting_of(top_k, row_index, vocab_size)
        p = setting_of(top_p, row_index, 1.0)
        row = logits + line * row_stride
        ids += line * BLOCK
        scale = scale_of(heat)
        rate = LOG2_E / scale
        floor = ceil_of(setting_of(min_p, row_index, 0.0) * WEIGHT_ONE)
        # what lies below weighs nothing; the second term outlasts the rounding of the first
        lowest = best - NO_WEIGHT * scale - tl.abs(best) * 1e-6
        tiles = tl.arange(0, TILES)
        is_tile = tiles < tl.where(k < vocab_size, 0, num_tiles)  # lines with top-k have no sums
        part = tl.load(sums + line * num_tiles + tiles, mask=is_tile, other=0)
        total = tl.sum(part, axis=0)
        floor_total = total * 0 + 0x7FFFFFFFFFFFFFFF
        low, high = lowest, lowest
        num, covers, is_list = vocab_size, best != best, best != best
        base_count, base_sum, base_floor = total * 0, total * 0, total * 0
        key, index = vocab_size * 0, total * 0
        first_id, last_id = key, key
        for stage in range(3):
            is_wanted = (stage == PLACE) | ((stage == TOP_K) & (k < vocab_size))
            if is_wanted | ((stage == TOP_P) & (p < 1.0)):
                need = k.to(tl.int64)
                if stage == TOP_P:
                    need = tl.minimum(ceil_of(p * total.to(tl.float64)), total)
                    need = tl.maximum(need, 1)
                if stage == PLACE:
                    total = tl.minimum(total, floor_total)
                    u = uniform_of(uniform, seeds, num_generated, line, row_index)
                    need = (u * total.to(tl.float64)).to(tl.int64) + 1
                if not covers:
                    if stage == TOP_P:
                        first = _lowest_of_top_p(best, scale, p, total, vocab_size)
                        lowest = tl.minimum(tl.maximum(lowest, first), best)
                    rough = need.to(tl.float32)
                    rough = tl.where(stage == TOP_K, rough, rough / WEIGHT_ONE)
                    per_logit = tl.where(stage == TOP_K, 0.0, rate)
                    low, high, is_list = narrow(
                        row,
                        vocab_size,
                        best,
                        per_logit,
                        lowest,
                        rough,
                        SWEEP_BLOCK,
                        PIVOTS,
                        BLOCK,
                    )
                    num = vocab_size
                    if is_list:
                        num = collect(
                            row, vocab_size, ids, num_listed + line, low, high, BLOCK, COLLECT_BLOCK
                        )
                        is_list = num <= BLOCK
                    num = tl.where(is_list, num, vocab_size)
                    high = tl.where(is_list, high, float("inf"))
                    covers = is_list & (high > best)
                    base_count, base_sum, base_floor = total * 0, total * 0, total * 0
                    if high <= best:
                        base_count, base_sum, base_floor = measure_from(
                            row, vocab_size, best, scale, high, floor, COLLECT_BLOCK
                        )
                base = tl.where(stage == TOP_K, base_count, base_sum)
                by = tl.where(stage == TOP_K, BY_COUNT, BY_WEIGHT)
                low_key, high_key = keys_of(low) >> SHIFT, keys_of(best) >> SHIFT
                key = _edge(
                    row,
                    ids,
                    is_list,
                    num,
                    best,
                    scale,
                    by,
                    key,
                    low_key,
                    high_key,
                    need - base,
                    SHIFT,
                    BLOCK,
                    LANES,
                )
                count, above, floor_sum, logit, first_id, last_id = _above(
                    row, ids, is_list, num, best, scale, key, floor, SHIFT, BLOCK
                )
                above += base_sum
                floor_total = base_floor + floor_sum
                weight = weights_of(logit, best, scale)
                if stage == TOP_K:
                    total = above + (k - count - base_count) * weight
                else:
                    weight = tl.maximum(weight, 1)
                    index = (need - 1 - above) // weight
                    total = above + (index + 1) * weight
                lowest = tl.maximum(lowest, logit)
        by_id = vocab_size * 0 + BY_ID
        token = -_edge(
            row,
            ids,
            is_list,
            num,
            best,
            scale,
            by_id,
            key,
            -last_id,
            -first_id,
            index + 1,
            SHIFT,
            BLOCK,
            LANES,
        )
        record(token, line, row_index, drawn, last_token_ids, num_generated)
