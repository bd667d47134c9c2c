"""Drawing tokens from logits: random stream, penalties, filters, the draw, log-probabilities: Triton.

Same acts as `reference/sampling.py`, on the same integer weights, which are summed exactly. So a
draw equals the twin's unless the random number falls within the rounding of `exp` (a relative 1e-5
of the total) of the edge between two tokens, or a filter's edge does; random numbers, greedy
choices, ranks and top tokens are always equal. A line's draw depends on that line alone. No launch
waits for the device or allocates by what the data says.
Knows nothing of requests, rows or which settings a caller may choose.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.reference import sampling as reference

TILE = 4096  # 38 tiles of a 151,936 vocabulary: one line alone still fills 38 multiprocessors
TILE_WARPS = 8
SEARCH_TILE = 1024  # times LANES sums of 8 bytes, over 512 threads: 64 registers a thread
SEARCH_WARPS = 16
LINES_PER_PROGRAM = 64

LANES = tl.constexpr(16)  # thresholds tried in one pass of a search
WEIGHT_ONE = tl.constexpr(reference.WEIGHT_ONE)
MIN_TEMPERATURE = tl.constexpr(reference.MIN_TEMPERATURE)
NO_WEIGHT = tl.constexpr(28.0)  # exp(-28) * 2^40 is below 1
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


def random_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per line: number `position` of the stream that `seed` names.

    Args:
        seeds: int64 [num_lines], any bits.
        positions: int64 [num_lines], tokens the line has drawn before.
    Returns:
        float64 [num_lines], equal to the twin's to the bit.
    """
    _check_settings(len(seeds), torch.int64, seeds, positions)
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        _random_uniform_kernel[(triton.cdiv(len(seeds), LINES_PER_PROGRAM),)](
            seeds, positions, out, len(seeds), BLOCK=LINES_PER_PROGRAM, num_warps=2
        )
    return out


def penalize(
    logits: Tensor,
    in_prompt: Tensor,
    num_generated: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits after the repetition, presence and frequency penalties, in this order.

    Moves 13 bytes a logit: logit and count in, one byte of prompt, penalised logit out.

    Args:
        logits: float32 [num_lines, vocab_size].
        in_prompt: bool [num_lines, vocab_size].
        num_generated: int32 [num_lines, vocab_size], occurrences in the output.
        repetition, presence, frequency: float [num_lines]; neutral at 1, 0, 0.
    Returns:
        float32 [num_lines, vocab_size].
    """
    num_lines, vocab_size = _check_logits(logits)
    assert logits.dtype == torch.float32, logits.dtype
    assert in_prompt.shape == num_generated.shape == logits.shape, (in_prompt.shape, logits.shape)
    assert in_prompt.is_contiguous() and num_generated.is_contiguous(), in_prompt.stride()
    assert in_prompt.dtype == torch.bool and num_generated.dtype == torch.int32, in_prompt.dtype
    _check_settings(num_lines, repetition.dtype, repetition, presence, frequency)
    out = torch.empty((num_lines, vocab_size), dtype=torch.float32, device=logits.device)
    if num_lines:
        _penalize_kernel[(num_lines, triton.cdiv(vocab_size, TILE))](
            logits,
            in_prompt.view(torch.uint8),
            num_generated,
            repetition,
            presence,
            frequency,
            out,
            logits.stride(0),
            vocab_size,
            BLOCK=TILE,
            num_warps=TILE_WARPS,
        )
    return out


def draw_tokens(logits: Tensor, temperature: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverse CDF over the vocabulary in its own order; the likeliest at temperature 0.

    Three launches: each tile's maximum; each tile's sum of weights; the tile and the token in it.
    Reads the logits twice.

    Args:
        logits: float32 or bfloat16 [num_lines, vocab_size].
        temperature: float64 [num_lines]; 0 takes the likeliest, ties to the lower id.
        min_p: float64 [num_lines]; tokens under this share of the likeliest's probability are out.
        uniform: float64 [num_lines] in [0, 1).
    Returns:
        int64 [num_lines], token ids.
    """
    num_lines, _ = _check_logits(logits)
    temperature, min_p = temperature.double(), min_p.double()
    _check_settings(num_lines, torch.float64, temperature, min_p, uniform)
    token_ids = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    if num_lines:
        peaks, peak_ids = _tile_peaks(logits)
        _draw_plain(logits, temperature, min_p, uniform, peaks, peak_ids, token_ids)
    return token_ids


def draw_filtered_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    max_top_k: int,
) -> Tensor:
    """Draw after temperature, then top-k, then top-p (of what top-k left), then min-p; sorts nothing.

    What filters keep is a prefix of the tokens from the likeliest on, so the sum of its weights
    tells it all, and the draw is a place in that order. Each of top-k's edge, top-p's edge and the
    drawn place is searched by 16-way division of the range of logits: up to 8 passes over a line,
    from L2 where it fits. One program a line.

    Args:
        logits, temperature, min_p, uniform: as `draw_tokens`.
        top_k: int64 [num_lines]; vocab_size and above is off.
        top_p: float64 [num_lines] in (0, 1]; 1 is off.
        max_top_k: not needed here: nothing is sorted.
    Returns:
        int64 [num_lines], token ids.
    """
    num_lines, _ = _check_logits(logits)
    temperature, top_p, min_p = temperature.double(), top_p.double(), min_p.double()
    _check_settings(num_lines, torch.float64, temperature, top_p, min_p, uniform)
    _check_settings(num_lines, torch.int64, top_k)
    token_ids = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    if num_lines:
        peaks, peak_ids = _tile_peaks(logits)
        settings = (temperature, top_k, top_p, min_p, uniform)
        _draw_filtered(logits, settings, peaks, token_ids, skip_unfiltered=False)
    return token_ids


def draw_rows(
    logits: Tensor, rows: Tensor, settings: reference.RowSettings, max_top_k: int
) -> tuple[Tensor, Tensor]:
    """Draw one token per line with the settings of its row, greedy, plain and filtered alike.

    Four launches, five where some row filters; the random numbers are made in the first. Reads the
    logits twice, filtered lines once more per pass of their searches.

    Args:
        logits: float32 or bfloat16 [num_lines, vocab_size].
        rows: int64 [num_lines], into the tensors of `settings`; a negative row's draw is arbitrary.
        settings: see `RowSettings`.
        max_top_k: 0 where the host knows that no row has top_k or top_p; else any other number.
    Returns:
        token_ids: int64 [num_lines].
        best: float32 [num_lines], the largest logit; NaN where the line holds one.
    """
    num_lines, vocab_size = _check_logits(logits)
    _check_settings(num_lines, torch.int64, rows)
    line = _line_settings(rows, settings, vocab_size)
    token_ids = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    best = torch.empty(num_lines, dtype=torch.float32, device=logits.device)
    if num_lines:
        peaks, peak_ids = _tile_peaks(logits)
        _draw_plain(
            logits,
            line.temperature,
            line.min_p,
            line.uniform,
            peaks,
            peak_ids,
            token_ids,
            best,
        )
        if max_top_k:
            filters = (line.temperature, line.top_k, line.top_p, line.min_p, line.uniform)
            _draw_filtered(logits, filters, peaks, token_ids, skip_unfiltered=True)
    return token_ids, best


def score_tokens(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities (natural log) of one token per line and of the likeliest ones.

    Two launches that read the logits once, and where num_top > 0 torch's top-k on 64-bit keys.

    Args:
        logits: float32 [num_lines, vocab_size].
        token_ids: int64 [num_lines].
        num_top: how many of the likeliest to report.
    Returns:
        logprobs: float32 [num_lines]; a probability of 0 is reported as float32's lowest number.
        ranks: int64 [num_lines], 1 is the likeliest; ties go to the lower token id.
        top_ids: int64 [num_lines, num_top], likeliest first, ties to the lower token id.
        top_logprobs: float32 [num_lines, num_top].
    """
    num_lines, vocab_size = _check_logits(logits)
    _check_settings(num_lines, torch.int64, token_ids)
    device, num_tiles = logits.device, triton.cdiv(vocab_size, TILE)
    peaks = torch.empty((num_lines, num_tiles), dtype=torch.float32, device=device)
    sums, ahead = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    log_sums = torch.empty(num_lines, dtype=torch.float32, device=device)
    logprobs, ranks = torch.empty_like(log_sums), torch.empty_like(token_ids)
    if num_lines:
        shape = (logits.stride(0), vocab_size)
        _tile_scores_kernel[(num_lines, num_tiles)](
            logits, token_ids, peaks, sums, ahead, *shape, BLOCK=TILE, num_warps=TILE_WARPS
        )
        tiles = triton.next_power_of_2(num_tiles)
        scores = (peaks, sums, ahead, log_sums, logprobs, ranks)
        _line_scores_kernel[(num_lines,)](
            logits, token_ids, *scores, shape[0], num_tiles, TILES=tiles, num_warps=1
        )
    if num_top == 0:
        none = logprobs.new_empty((num_lines, 0))
        return logprobs, ranks, none.to(torch.int64), none
    top_ids = reference.likeliest_tokens(logits, num_top)
    top_logprobs = logits.gather(1, top_ids) - log_sums[:, None]  # [num_lines, num_top]
    return logprobs, ranks, top_ids, top_logprobs.clamp_(min=torch.finfo(torch.float32).min)


def _line_settings(
    rows: Tensor, settings: reference.RowSettings, vocab_size: int
) -> reference.LineSettings:
    num_lines, device = len(rows), rows.device
    _check_settings(len(settings.seeds), torch.int64, settings.seeds, settings.num_generated)
    _check_settings(len(settings.seeds), torch.int64, settings.top_k)
    reals = (settings.temperature, settings.top_p, settings.min_p)
    _check_settings(len(settings.seeds), torch.float64, *reals)
    temperature, top_p, min_p, uniform = (
        torch.empty(num_lines, dtype=torch.float64, device=device) for _ in range(4)
    )
    line = reference.LineSettings(temperature, torch.empty_like(rows), top_p, min_p, uniform)
    if num_lines:
        _line_settings_kernel[(triton.cdiv(num_lines, LINES_PER_PROGRAM),)](
            rows, *settings, *line, num_lines, vocab_size, BLOCK=LINES_PER_PROGRAM, num_warps=2
        )
    return line


def _tile_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    num_lines, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    peaks = torch.empty((num_lines, num_tiles), dtype=torch.float32, device=logits.device)
    peak_ids = torch.empty_like(peaks, dtype=torch.int32)
    _tile_peaks_kernel[(num_lines, num_tiles)](
        logits,
        peaks,
        peak_ids,
        logits.stride(0),
        vocab_size,
        BLOCK=TILE,
        num_warps=TILE_WARPS,
    )
    return peaks, peak_ids


def _draw_plain(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    peaks: Tensor,
    peak_ids: Tensor,
    token_ids: Tensor,
    best: Tensor | None = None,
) -> None:
    (num_lines, vocab_size), num_tiles = logits.shape, peaks.shape[1]
    sums = torch.empty((num_lines, num_tiles), dtype=torch.int64, device=logits.device)
    shape = (logits.stride(0), vocab_size, num_tiles)
    tiles = triton.next_power_of_2(num_tiles)
    _tile_sums_kernel[(num_lines, num_tiles)](
        logits,
        temperature,
        min_p,
        peaks,
        sums,
        *shape,
        TILES=tiles,
        BLOCK=TILE,
        num_warps=TILE_WARPS,
    )
    _pick_kernel[(num_lines,)](
        logits,
        temperature,
        min_p,
        uniform,
        peaks,
        peak_ids,
        sums,
        token_ids,
        best,
        *shape,
        TILES=tiles,
        BLOCK=TILE,
        HAS_BEST=best is not None,
        num_warps=TILE_WARPS,
    )


def _draw_filtered(
    logits: Tensor,
    settings: tuple[Tensor, ...],
    peaks: Tensor,
    token_ids: Tensor,
    *,
    skip_unfiltered: bool,
) -> None:
    num_lines, vocab_size = logits.shape
    _draw_filtered_kernel[(num_lines,)](
        logits,
        *settings,
        peaks,
        token_ids,
        logits.stride(0),
        vocab_size,
        peaks.shape[1],
        TILES=triton.next_power_of_2(peaks.shape[1]),
        BLOCK=SEARCH_TILE,
        SKIP_UNFILTERED=skip_unfiltered,
        num_warps=SEARCH_WARPS,
    )


def _check_logits(logits: Tensor) -> tuple[int, int]:
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1 or num_lines == 0, logits.stride()
    assert logits.dtype in (torch.float32, torch.bfloat16), logits.dtype
    assert 0 < vocab_size < 2**23, vocab_size  # sums of weights must fit 63 bits
    return num_lines, vocab_size


def _check_settings(num_lines: int, dtype: torch.dtype, *settings: Tensor) -> None:
    for setting in settings:
        assert setting.shape == (num_lines,) and setting.dtype == dtype, (setting.shape, num_lines)
        assert setting.is_contiguous(), setting.stride()


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
def _random_uniform_kernel(seeds, positions, out, num_lines, BLOCK: tl.constexpr):
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lines < num_lines
    seed = tl.load(seeds + lines, mask=mask, other=0)
    position = tl.load(positions + lines, mask=mask, other=0)
    tl.store(out + lines, _uniform(seed, position), mask=mask)


@triton.jit
def _line_settings_kernel(
    rows,
    seeds,
    num_generated,
    temperature,
    top_k,
    top_p,
    min_p,
    temperature_out,
    top_k_out,
    top_p_out,
    min_p_out,
    uniform_out,
    num_lines,
    vocab_size,
    BLOCK: tl.constexpr,
):
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lines < num_lines
    row = tl.load(rows + lines, mask=mask, other=-1)
    has_row = row >= 0  # the others draw greedily, with no filter
    heat = tl.load(temperature + row, mask=has_row, other=0.0)
    tl.store(temperature_out + lines, heat, mask=mask)
    k = tl.load(top_k + row, mask=has_row, other=0)
    tl.store(top_k_out + lines, tl.where(has_row, k, vocab_size), mask=mask)
    p = tl.load(top_p + row, mask=has_row, other=1.0)
    tl.store(top_p_out + lines, p, mask=mask)
    floor = tl.load(min_p + row, mask=has_row, other=0.0)
    tl.store(min_p_out + lines, floor, mask=mask)
    seed = tl.load(seeds + row, mask=has_row, other=0)
    position = tl.load(num_generated + row, mask=has_row, other=0)
    tl.store(uniform_out + lines, _uniform(seed, position), mask=mask)


@triton.jit
def _penalize_kernel(
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
def _tile_peaks_kernel(logits, peaks, peak_ids, row_stride, vocab_size, BLOCK: tl.constexpr):
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
def _scale(temperature):
    return tl.maximum(temperature.to(tl.float32), MIN_TEMPERATURE)


@triton.jit
def _floor(min_p):
    """The smallest whole weight that is at least min_p of the likeliest's."""
    exact = min_p * WEIGHT_ONE
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def _weights(x, best, scale):
    share = tl.exp(tl.div_rn(x - best, scale + tl.zeros_like(x)))
    return (share * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _tile_weights(line_logits, columns, vocab_size, best, scale, floor):
    mask = columns < vocab_size
    x = tl.load(line_logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
    weights = _weights(x, best, scale)
    return tl.where(mask & (weights >= floor), weights, 0)


@triton.jit
def _line_peak(peaks, line, num_tiles, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    at = peaks + line * num_tiles + tiles
    return _peak(tl.load(at, mask=tiles < num_tiles, other=float("-inf")))


@triton.jit
def _tile_sums_kernel(
    logits,
    temperature,
    min_p,
    peaks,
    sums,
    row_stride,
    vocab_size,
    num_tiles,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + line)
    if heat > 0:
        best = _line_peak(peaks, line, num_tiles, TILES)
        floor = _floor(tl.load(min_p + line))
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        row = logits + line * row_stride
        weights = _tile_weights(row, columns, vocab_size, best, _scale(heat), floor)
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
def _pick_kernel(
    logits,
    temperature,
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
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BEST: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    at, is_tile = line * num_tiles + tiles, tiles < num_tiles
    best = _line_peak(peaks, line, num_tiles, TILES)
    if HAS_BEST:
        tl.store(best_out + line, best)
    heat = tl.load(temperature + line)
    if heat > 0:
        part = tl.load(sums + at, mask=is_tile, other=0)
        total = tl.sum(part, axis=0)
        target = (tl.load(uniform + line) * total.to(tl.float64)).to(tl.int64)
        tile, before = _place(part, target, TILES)
        floor = _floor(tl.load(min_p + line))
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        row = logits + line * row_stride
        weights = _tile_weights(row, columns, vocab_size, best, _scale(heat), floor)
        index, _ = _place(weights, target - before, BLOCK)
        tl.store(token_ids + line, (tile * BLOCK + index).to(tl.int64))
    else:
        tile_peaks = tl.load(peaks + at, mask=is_tile, other=float("-inf"))
        ids = tl.load(peak_ids + at, mask=is_tile, other=vocab_size)
        is_best = (tile_peaks == best) | (tile_peaks != tile_peaks)
        token = tl.min(tl.where(is_tile & is_best, ids, vocab_size - 1), axis=0)
        tl.store(token_ids + line, token.to(tl.int64))


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
    if BY_COUNT:
        measure = mask.to(tl.int64)
    else:
        measure = _weights(x, best, scale)
    return _keys(x), measure


@triton.jit
def _edge_key(
    row, vocab_size, best, scale, low, high, need, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
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
def _draw_filtered_kernel(
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
    SKIP_UNFILTERED: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    heat, k, p = tl.load(temperature + line), tl.load(top_k + line), tl.load(top_p + line)
    best = _line_peak(peaks, line, num_tiles, TILES)
    heat = tl.where(best == best, heat, 0.0)  # a line with NaN has no order
    if SKIP_UNFILTERED:
        heat = tl.where(k < vocab_size, heat, tl.where(p < 1.0, heat, 0.0))
    if heat > 0:
        row = logits + line * row_stride
        scale = _scale(heat)
        high = _keys(best)
        # what lies below weighs nothing; the second term outlasts the rounding of the first
        low = _keys(best - NO_WEIGHT * scale - tl.abs(best) * 1e-6)
        floor = _floor(tl.load(min_p + line))
        edge = low
        if k < vocab_size:
            edge = _edge_key(row, vocab_size, best, scale, low, high, k, True, BLOCK)
        count, total, floor_total = _above(row, vocab_size, best, scale, edge, floor, BLOCK)
        total += (k - count) * _weights(_key_value(edge), best, scale)
        if p < 1.0:
            need = _whole_above(p * total.to(tl.float64))
            need = tl.maximum(tl.minimum(need, total), 1)
            edge = _edge_key(row, vocab_size, best, scale, edge, high, need, False, BLOCK)
            _, above, _ = _above(row, vocab_size, best, scale, edge, floor, BLOCK)
            weight = tl.maximum(_weights(_key_value(edge), best, scale), 1)
            total = above + (need - above + weight - 1) // weight * weight
        total = tl.minimum(total, floor_total)
        target = (tl.load(uniform + line) * total.to(tl.float64)).to(tl.int64)
        key = _edge_key(row, vocab_size, best, scale, edge, high, target + 1, False, BLOCK)
        _, above, _ = _above(row, vocab_size, best, scale, key, floor, BLOCK)
        weight = tl.maximum(_weights(_key_value(key), best, scale), 1)
        index = (target - above) // weight
        token = _token_of_key(row, vocab_size, key, index, BLOCK)
        tl.store(token_ids + line, token.to(tl.int64))
    elif not SKIP_UNFILTERED:
        tl.store(token_ids + line, 0)


@triton.jit
def _whole_above(exact):
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def _tile_scores_kernel(
    logits, token_ids, peaks, sums, ahead, row_stride, vocab_size, BLOCK: tl.constexpr
):
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    row = logits + line * row_stride
    token = tl.load(token_ids + line)
    chosen = tl.load(row + token).to(tl.float32)
    x = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    shares = tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))
    is_ahead = mask & ((x > chosen) | ((x == chosen) & (columns < token)))
    at = line * tl.num_programs(1) + tile
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(shares, axis=0))
    tl.store(ahead + at, tl.sum(is_ahead.to(tl.int32), axis=0))


@triton.jit
def _line_scores_kernel(
    logits,
    token_ids,
    peaks,
    sums,
    ahead,
    log_sums,
    logprobs,
    ranks,
    row_stride,
    num_tiles,
    TILES: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    at, mask = line * num_tiles + tiles, tiles < num_tiles
    peak = tl.load(peaks + at, mask=mask, other=float("-inf"))
    best = tl.max(peak, axis=0)
    share = tl.load(sums + at, mask=mask, other=0.0)
    log_sum = best + tl.log(tl.sum(share * tl.exp(peak - best), axis=0))
    token = tl.load(token_ids + line)
    chosen = tl.load(logits + line * row_stride + token).to(tl.float32)
    rank = tl.sum(tl.load(ahead + at, mask=mask, other=0), axis=0) + 1
    tl.store(log_sums + line, log_sum)
    tl.store(logprobs + line, tl.maximum(chosen - log_sum, LOWEST))
    tl.store(ranks + line, rank.to(tl.int64))
