"""Device code of the filtered draw: the place of an edge in a line, narrowed to a short list.

Rough sums over the line, by float32, bound where the edge may be; nothing is decided by them.
Knows nothing of launches, nor of what an edge is for.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.sampling_kernels import weights_of

MAX_SWEEPS = tl.constexpr(8)  # each divides the window by PIVOTS; only ties outlast them


@triton.jit
def keys_of(x):
    """int32 that orders as the floats do; both zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load_column(row, start, vocab_size, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)[:, None]
    return tl.load(row + columns, mask=columns < vocab_size, other=float("-inf"))  # [BLOCK, 1]


@triton.jit
def _sweep(row, vocab_size, pivots, best, rate, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Rough weight of the tokens from each pivot up, where the likeliest token weighs 1."""
    sums = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
    # two blocks are on their way while one is summed: the cache is far, and few warps hide it
    block = _load_column(row, 0, vocab_size, BLOCK)
    after = _load_column(row, BLOCK, vocab_size, BLOCK)
    for start in range(0, vocab_size, BLOCK):
        ahead = _load_column(row, start + 2 * BLOCK, vocab_size, BLOCK)
        x = block.to(tl.float32)
        weights = tl.exp2((x - best) * rate)
        sums += tl.where(x >= pivots[None, :], weights, 0.0)  # [BLOCK, PIVOTS]
        block = after
        after = ahead
    return tl.sum(sums, axis=0)


@triton.jit
def _at_lane(values, lanes, lane):
    return tl.sum(tl.where(lanes == lane, values, 0.0), axis=0)


@triton.jit
def narrow(
    row,
    vocab_size,
    best,
    rate,
    low,
    need,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """A window [low, high) of logits that holds the edge where the tokens from it up reach `need`.

    With at most about CAPACITY tokens, where it can be had. `high` is infinite where no more than
    that lie from `low` up. A token weighs exp2((x - best) * rate): at rate 0 they are counted.
    """
    lanes = tl.arange(0, PIVOTS)
    slack = 2e-5 + 1.2e-7 * (vocab_size / BLOCK)  # a sum's relative error, at the very most
    zero = best * 0.0
    high, high_sum, high_count = zero + float("inf"), zero, zero
    num = zero + vocab_size
    sweeps = 0
    while (num > CAPACITY) & (sweeps < MAX_SWEEPS):
        step = (tl.minimum(high, best) - low) / PIVOTS
        pivots = low + lanes * step
        sums = _sweep(row, vocab_size, pivots, best, rate, BLOCK, PIVOTS)
        # tokens between two pivots are no more than their weight over that of the lower pivot
        per_weight = tl.exp2((best - pivots) * rate)
        per_weight_below = tl.exp2((best - pivots + step) * rate)
        beyond = high_count - high_sum * _at_lane(per_weight, lanes, PIVOTS - 1)
        gained = sums * (per_weight - per_weight_below)
        lane = tl.sum((sums * (1.0 - slack) >= need).to(tl.int32), axis=0)
        lane = tl.maximum(lane - 1, 0)
        low = _at_lane(pivots, lanes, lane)
        num_up = _at_lane(sums * per_weight, lanes, lane) + beyond
        num_up += tl.sum(tl.where(lanes > lane, gained, 0.0), axis=0)
        num_short = tl.sum((sums * (1.0 + slack) < need).to(tl.int32), axis=0)
        if num_short > 0:
            lane = PIVOTS - num_short
            high = _at_lane(pivots, lanes, lane)
            high_sum = _at_lane(sums, lanes, lane)
            high_count = high_sum * _at_lane(per_weight, lanes, lane) + beyond
            high_count += tl.sum(tl.where(lanes > lane, gained, 0.0), axis=0)
        if num_up <= CAPACITY:
            high, high_sum, high_count = zero + float("inf"), zero, zero
        num = num_up - high_count
        sweeps += 1
    return low, high, num <= CAPACITY


@triton.jit
def collect(row, vocab_size, ids, counter, low, high, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Lists ids of tokens in the window, in any order, CAPACITY at most; counts those in it."""
    tl.debug_barrier()  # no one reads an older list any more
    tl.store(counter, 0)
    tl.debug_barrier()
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        x = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
        is_in = mask & (x >= low) & (x < high)
        at = tl.atomic_add(counter + columns * 0, 1, mask=is_in, sem="relaxed")
        tl.store(ids + at, columns, mask=is_in & (at < CAPACITY))
    tl.debug_barrier()
    return tl.atomic_add(counter, 0, sem="relaxed")


@triton.jit
def measure_from(row, vocab_size, best, scale, high, floor, BLOCK: tl.constexpr):
    """Count and weight of a line's tokens from `high` up; weight of those at `floor` or more."""
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    floor_sums = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        x = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
        weights = tl.where(x >= high, weights_of(x, best, scale), 0)
        counts += (x >= high).to(tl.int32)
        sums += weights
        floor_sums += tl.where(weights >= floor, weights, 0)
    return tl.sum(counts, axis=0).to(tl.int64), tl.sum(sums, axis=0), tl.sum(floor_sums, axis=0)
