"""Device code of `sampling.py`: draws in vocabulary order, and what all draws need of a line.

Knows nothing of launches; what a draw means stands at its twin in `reference/sampling.py`.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.dependent_launch import release_successor, wait_for_predecessor
from zipage_lang.kernels.sampling_kernels import (
    ALL_LINES,
    NO_LINES,
    WEIGHT_ONE,
    ceil_of,
    has_filter,
    row_of,
    scale_of,
    setting_of,
    uniform_of,
    weights_of,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _peak(values):
    """The largest value, NaN if there is one: a maximum alone may lose it."""
    is_nan = (values != values).to(tl.int32)
    peak = tl.max(tl.where(is_nan != 0, float("-inf"), values), axis=0)
    return tl.where(tl.max(is_nan, axis=0) != 0, float("nan"), peak)


@triton.jit
def line_peak(peaks, line, num_tiles, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    at = peaks + line * num_tiles + tiles
    return _peak(tl.load(at, mask=tiles < num_tiles, other=float("-inf")))


@triton.jit
def is_drawn_in_order(heat, best, top_k, top_p, row, vocab_size, FILTERS: tl.constexpr):
    """Whether the filtered draw takes the line; a line without a finite best has no order."""
    if FILTERS == NO_LINES:
        return heat < 0
    elif FILTERS == ALL_LINES:
        return (heat > 0) & (tl.abs(best) < float("inf"))
    else:
        is_filtered = has_filter(top_k, top_p, row, vocab_size)
        return (heat > 0) & (tl.abs(best) < float("inf")) & is_filtered


@triton.jit
def record(token, line, row, drawn, last_token_ids, num_generated):
    """The line's draw, and its row one token further on; no one reads the row's count after it."""
    tl.store(drawn + line, token.to(tl.int64))
    if last_token_ids is not None:
        tl.debug_barrier()  # every warp has read the count
        tl.store(last_token_ids + row, token.to(tl.int64), mask=row >= 0)
        count = tl.load(num_generated + row, mask=row >= 0, other=0)
        tl.store(num_generated + row, count + 1, mask=row >= 0)


@triton.jit
def _share_of(x, best, temperature):
    """The weight of `x` where `best` weighs 1: the same in fewer steps, to float32's rounding."""
    return tl.exp2((x - best) * (LOG2_E / scale_of(temperature)))


@triton.jit
def tile_masses_kernel(
    logits,
    rows,
    temperature,
    peaks,
    masses,
    row_stride,
    vocab_size,
    num_tiles,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each tile's largest logit and its sum of weights, where that logit weighs 1; NaN shows."""
    release_successor(PDL)
    wait_for_predecessor(PDL)
    tile, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + line * row_stride + columns, mask=columns < vocab_size, other=float("-inf")
    ).to(tl.float32)
    heat = setting_of(temperature, row_of(rows, line), 0.0)
    peak = tl.max(x, axis=0)
    mass = tl.sum(_share_of(x, tl.where(peak == float("-inf"), 0.0, peak), heat), axis=0)
    at = line * num_tiles + tile
    tl.store(peaks + at, tl.where((mass != mass) & (peak < float("inf")), float("nan"), peak))
    tl.store(masses + at, mass)


@triton.jit
def _tile_weights(line_logits, columns, vocab_size, best, scale, floor):
    mask = columns < vocab_size
    x = tl.load(line_logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
    weights = weights_of(x, best, scale)
    return tl.where(mask & (weights >= floor), weights, 0)


@triton.jit
def tile_sums_kernel(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    sums,
    row_stride,
    vocab_size,
    num_tiles,
    FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of weights where a filtered draw needs them: top-p, of all tokens; top-k does not."""
    tile, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = row_of(rows, line)
    heat = setting_of(temperature, row, 0.0)
    if FILTERS != ALL_LINES:
        heat = tl.where(has_filter(top_k, top_p, row, vocab_size), heat, 0.0)
    heat = tl.where(setting_of(top_k, row, vocab_size) < vocab_size, 0.0, heat)
    if heat > 0:
        least = tl.where(setting_of(top_p, row, 1.0) < 1.0, 0.0, setting_of(min_p, row, 0.0))
        best = line_peak(peaks, line, num_tiles, TILES)
        floor = ceil_of(least * WEIGHT_ONE)
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        line_logits = logits + line * row_stride
        weights = _tile_weights(line_logits, columns, vocab_size, best, scale_of(heat), floor)
        tl.store(sums + line * num_tiles + tile, tl.sum(weights, axis=0))


@triton.jit
def _sums_over_floor(
    line_logits,
    peaks,
    vocab_size,
    num_tiles,
    best,
    scale,
    floor,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each tile's sum of the weights at `floor` or more; reads the tiles that have any."""
    tiles = tl.arange(0, TILES)
    sums = tl.zeros((TILES,), dtype=tl.int64)
    for tile in range(num_tiles):
        if weights_of(tl.load(peaks + tile), best, scale) >= floor:
            columns = tile * BLOCK + tl.arange(0, BLOCK)
            weights = _tile_weights(line_logits, columns, vocab_size, best, scale, floor)
            sums = tl.where(tiles == tile, tl.sum(weights, axis=0), sums)
    return sums


@triton.jit
def _place(weights, target, COUNT: tl.constexpr):
    """The first index whose running sum passes the target, and the sum before it."""
    reach = tl.cumsum(weights, axis=0)
    index = tl.sum((reach <= target).to(tl.int32), axis=0)
    at = tl.arange(0, COUNT)
    index = tl.minimum(index, tl.max(tl.where(weights > 0, at, 0), axis=0))
    return index, tl.sum(tl.where(at < index, weights, 0), axis=0)


@triton.jit
def pick_kernel(
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
    masses,
    drawn,
    row_stride,
    vocab_size,
    num_tiles,
    FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A plain line's draw: its tile by the tiles' masses, then its token by the tile's weights.

    The likeliest token of greedy and filtered lines. Weights within a tile are of the tile's own
    likeliest token, so that a tile that is taken always has a token to take; with min-p, whose
    floor is a share of the line's best, they are of that one.
    """
    wait_for_predecessor(PDL)
    line = tl.program_id(0).to(tl.int64)
    peaks += line * num_tiles
    tiles = tl.arange(0, TILES)
    is_tile = tiles < num_tiles
    tile_peaks = tl.load(peaks + tiles, mask=is_tile, other=float("-inf"))
    best = _peak(tile_peaks)
    row = row_of(rows, line)
    heat = setting_of(temperature, row, 0.0)
    line_logits = logits + line * row_stride
    is_left = is_drawn_in_order(heat, best, top_k, top_p, row, vocab_size, FILTERS)
    if (heat > 0) & (not is_left):
        scale, least = scale_of(heat), setting_of(min_p, row, 0.0)
        floor = ceil_of(least * WEIGHT_ONE)
        if least > 0:
            part = _sums_over_floor(
                line_logits, peaks, vocab_size, num_tiles, best, scale, floor, TILES, BLOCK
            )
        else:
            mass = tl.load(masses + line * num_tiles + tiles, mask=is_tile, other=0.0)
            part = (mass * _share_of(tile_peaks, best, heat) * WEIGHT_ONE).to(tl.int64)
        total = tl.sum(part, axis=0)
        u = uniform_of(uniform, seeds, num_generated, line, row)
        target = (u * total.to(tl.float64)).to(tl.int64)
        tile, before = _place(part, target, TILES)
        tile_sum = tl.sum(tl.where(tiles == tile, part, 0), axis=0)
        likeliest = tl.where(least > 0, best, tl.load(peaks + tile))
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        weights = _tile_weights(line_logits, columns, vocab_size, likeliest, scale, floor)
        way = (target - before).to(tl.float64) / tl.maximum(tile_sum, 1).to(tl.float64)
        target = (way * tl.sum(weights, axis=0).to(tl.float64)).to(tl.int64)
        index, _ = _place(weights, target, BLOCK)
        token = tile * BLOCK + index
    else:
        is_best = (tile_peaks == best) | (tile_peaks != tile_peaks)
        tile = tl.min(tl.where(is_tile & is_best, tiles, num_tiles - 1), axis=0)
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        x = tl.load(line_logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
        is_best = mask & ((x == best) | (x != x))
        token = tl.min(tl.where(is_best, columns, vocab_size - 1), axis=0)
    is_broken = (tl.abs(best) < float("inf")) == 0
    tl.store(drawn + tl.num_programs(0) + line, is_broken.to(tl.int64))
    if not is_left:
        record(token, line, row, drawn, last_token_ids, num_generated)
