"""Device code of `sampling.py`: random stream, penalties, draws in vocabulary order.

Knows nothing of launches; what each act means stands at its twin in `reference/sampling.py`.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.reference import sampling as reference

WEIGHT_ONE = tl.constexpr(reference.WEIGHT_ONE)
MIN_TEMPERATURE = tl.constexpr(reference.MIN_TEMPERATURE)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
NO_LINES, SOME_LINES, ALL_LINES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(seed, position):
    steps = (position + 1).to(tl.uint64) * GOLDEN
    bits = _mix(_mix(seed.to(tl.uint64) + GOLDEN) + steps)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def random_uniform_kernel(seeds, positions, out, num_lines, BLOCK: tl.constexpr):
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lines < num_lines
    seed = tl.load(seeds + lines, mask=mask, other=0)
    position = tl.load(positions + lines, mask=mask, other=0)
    tl.store(out + lines, _uniform(seed, position), mask=mask)


@triton.jit
def row_of(rows, line):
    """The row whose settings a line has: its own number where no rows are given."""
    if rows is None:
        return line
    else:
        return tl.load(rows + line)


@triton.jit
def setting_of(settings, row, neutral):
    """A row's setting; `neutral` for padding, and where no line has the setting."""
    if settings is None:
        return neutral
    else:
        return tl.load(settings + row, mask=row >= 0, other=neutral)


@triton.jit
def has_filter(top_k, top_p, row, vocab_size):
    is_cut = setting_of(top_k, row, vocab_size) < vocab_size
    return is_cut | (setting_of(top_p, row, 1.0) < 1.0)


@triton.jit
def uniform_of(uniform, seeds, num_generated, line, row):
    if uniform is None:
        return _uniform(setting_of(seeds, row, 0), setting_of(num_generated, row, 0))
    else:
        return tl.load(uniform + line)


@triton.jit
def penalize_kernel(
    logits,
    in_prompt,
    num_generated,
    repetition,
    presence,
    frequency,
    out,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    x = tl.load(logits + line * row_stride + columns, mask=mask, other=0.0)
    prompt = tl.load(in_prompt + line * vocab_size + columns, mask=mask, other=0)
    count = tl.load(num_generated + line * vocab_size + columns, mask=mask, other=0)
    by = tl.load(repetition + line).to(tl.float32)
    repeated = tl.where(x < 0, x * by, tl.div_rn(x, by + tl.zeros_like(x)))
    x = tl.where((prompt != 0) | (count > 0), repeated, x)
    x -= tl.load(presence + line).to(tl.float32) * (count > 0).to(tl.float32)
    x -= tl.load(frequency + line).to(tl.float32) * count.to(tl.float32)
    tl.store(out + line * vocab_size + columns, x, mask=mask)


@triton.jit
def _peak(values):
    """The largest value, NaN if there is one: a maximum alone may lose it."""
    is_nan = (values != values).to(tl.int32)
    peak = tl.max(tl.where(is_nan != 0, float("-inf"), values), axis=0)
    return tl.where(tl.max(is_nan, axis=0) != 0, float("nan"), peak)


@triton.jit
def tile_peaks_kernel(logits, peaks, peak_ids, row_stride, vocab_size, BLOCK: tl.constexpr):
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    x = tl.load(logits + line * row_stride + columns, mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    peak = _peak(x)
    is_peak = mask & ((x == peak) | (x != x))
    first = tl.min(tl.where(is_peak, columns, vocab_size), axis=0)
    at = line * tl.num_programs(1) + tile
    tl.store(peaks + at, peak)
    tl.store(peak_ids + at, first)


@triton.jit
def scale_of(temperature):
    return tl.maximum(temperature.to(tl.float32), MIN_TEMPERATURE)


@triton.jit
def ceil_of(exact):
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def weights_of(x, best, scale):
    share = tl.exp(tl.div_rn(x - best, scale + tl.zeros_like(x)))
    return (share * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _tile_weights(line_logits, columns, vocab_size, best, scale, floor):
    mask = columns < vocab_size
    x = tl.load(line_logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
    weights = weights_of(x, best, scale)
    return tl.where(mask & (weights >= floor), weights, 0)


@triton.jit
def line_peak(peaks, line, num_tiles, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    at = peaks + line * num_tiles + tiles
    return _peak(tl.load(at, mask=tiles < num_tiles, other=float("-inf")))


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
    """Sums of weights where a draw needs them: after top-k it does not; before top-p all count."""
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = row_of(rows, line)
    heat = setting_of(temperature, row, 0.0)
    least = setting_of(min_p, row, 0.0)
    if FILTERS != NO_LINES:
        heat = tl.where(setting_of(top_k, row, vocab_size) < vocab_size, 0.0, heat)
        least = tl.where(setting_of(top_p, row, 1.0) < 1.0, 0.0, least)
    if heat > 0:
        best = line_peak(peaks, line, num_tiles, TILES)
        floor = ceil_of(least * WEIGHT_ONE)
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        line_logits = logits + line * row_stride
        weights = _tile_weights(line_logits, columns, vocab_size, best, scale_of(heat), floor)
        tl.store(sums + line * num_tiles + tile, tl.sum(weights, axis=0))


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
    uniform,
    peaks,
    peak_ids,
    sums,
    token_ids,
    best_out,
    row_stride,
    vocab_size,
    num_tiles,
    FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A plain line's draw from its sums; the likeliest token of greedy and filtered lines."""
    line = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    at, is_tile = line * num_tiles + tiles, tiles < num_tiles
    best = line_peak(peaks, line, num_tiles, TILES)
    tl.store(best_out + line, best)
    row = row_of(rows, line)
    heat = setting_of(temperature, row, 0.0)
    if FILTERS == ALL_LINES:
        heat = heat * 0
    if FILTERS == SOME_LINES:
        heat = tl.where(has_filter(top_k, top_p, row, vocab_size), 0.0, heat)
    if heat > 0:
        part = tl.load(sums + at, mask=is_tile, other=0)
        total = tl.sum(part, axis=0)
        u = uniform_of(uniform, seeds, num_generated, line, row)
        target = (u * total.to(tl.float64)).to(tl.int64)
        tile, before = _place(part, target, TILES)
        floor = ceil_of(setting_of(min_p, row, 0.0) * WEIGHT_ONE)
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        line_logits = logits + line * row_stride
        weights = _tile_weights(line_logits, columns, vocab_size, best, scale_of(heat), floor)
        index, _ = _place(weights, target - before, BLOCK)
        tl.store(token_ids + line, (tile * BLOCK + index).to(tl.int64))
    else:
        tile_peaks = tl.load(peaks + at, mask=is_tile, other=float("-inf"))
        ids = tl.load(peak_ids + at, mask=is_tile, other=vocab_size)
        is_best = (tile_peaks == best) | (tile_peaks != tile_peaks)
        token = tl.min(tl.where(is_tile & is_best, ids, vocab_size - 1), axis=0)
        tl.store(token_ids + line, token.to(tl.int64))
