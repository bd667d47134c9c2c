"""Drawing tokens from logits in Triton: random stream, penalties, filters, draw, log-probabilities.

Same acts as `reference/sampling.py`, on the same integer weights, which are summed exactly. So a
draw equals the twin's unless the random number falls within the rounding of `exp` (a relative 1e-5
of the total) of the edge between two tokens, or a filter's edge does; random numbers, greedy
choices, ranks and top tokens are always equal. A line's draw depends on that line alone. No launch
waits for the device or allocates by what the data says.
Knows nothing of requests, rows or which settings a caller may choose.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from zipage_lang.kernels.backend import RowSettings
from zipage_lang.kernels.filter_kernels import draw_filtered_kernel
from zipage_lang.kernels.reference import sampling as reference
from zipage_lang.kernels.sampling_kernels import (
    line_scores_kernel,
    line_settings_kernel,
    penalize_kernel,
    pick_kernel,
    random_uniform_kernel,
    tile_peaks_kernel,
    tile_scores_kernel,
    tile_sums_kernel,
)

TILE = 4096  # 38 tiles of a 151,936 vocabulary: one line alone still fills 38 multiprocessors
TILE_WARPS = 8
SEARCH_TILE, SEARCH_LANES = 4096, 4  # as many sums of 8 bytes over 512 threads: 64 registers each
SEARCH_WARPS = 16
LINES_PER_PROGRAM = 64


class _LineSettings(NamedTuple):
    """The settings of the lines of one draw, types as in `RowSettings`. All [num_lines]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor  # float64 in [0, 1)


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
        random_uniform_kernel[(triton.cdiv(len(seeds), LINES_PER_PROGRAM),)](
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
    assert in_prompt.is_contiguous(), in_prompt.stride()
    assert num_generated.is_contiguous(), num_generated.stride()
    assert in_prompt.dtype == torch.bool, in_prompt.dtype
    assert num_generated.dtype == torch.int32, num_generated.dtype
    _check_settings(num_lines, repetition.dtype, repetition, presence, frequency)
    out = torch.empty((num_lines, vocab_size), dtype=torch.float32, device=logits.device)
    if num_lines:
        penalize_kernel[(num_lines, triton.cdiv(vocab_size, TILE))](
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
        logits: float32, bfloat16 or float16 [num_lines, vocab_size].
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
    """Draw after temperature, then top-k, then top-p (of what top-k left), then min-p; no sort.

    What filters keep is a prefix of the tokens from the likeliest on, so the sum of its weights
    tells it all, and the draw is a place in that order. Each of top-k's edge, top-p's edge and the
    drawn place is searched by division of the range of logits: up to 16 passes over a line, from L2
    where it fits. One program a line.

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
        peaks, _ = _tile_peaks(logits)
        line = _LineSettings(temperature, top_k, top_p, min_p, uniform)
        _draw_filtered(logits, line, peaks, token_ids, skip_unfiltered=False)
    return token_ids


def draw_rows(
    logits: Tensor, rows: Tensor, settings: RowSettings, max_top_k: int
) -> tuple[Tensor, Tensor]:
    """Draw one token per line with the settings of its row, greedy, plain and filtered alike.

    Four launches, five where some row filters; the random numbers are made in the first. Reads the
    logits twice, filtered lines once more per pass of their searches.

    Args:
        logits: float32, bfloat16 or float16 [num_lines, vocab_size].
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
            _draw_filtered(logits, line, peaks, token_ids, skip_unfiltered=True)
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
        tile_scores_kernel[(num_lines, num_tiles)](
            logits, token_ids, peaks, sums, ahead, *shape, BLOCK=TILE, num_warps=TILE_WARPS
        )
        tiles = triton.next_power_of_2(num_tiles)
        scores = (peaks, sums, ahead, log_sums, logprobs, ranks)
        line_scores_kernel[(num_lines,)](
            logits, token_ids, *scores, shape[0], num_tiles, TILES=tiles, num_warps=1
        )
    if num_top == 0:
        none = logprobs.new_empty((num_lines, 0))
        return logprobs, ranks, none.to(torch.int64), none
    top_ids = reference.likeliest_tokens(logits, num_top)
    top_logprobs = logits.gather(1, top_ids) - log_sums[:, None]  # [num_lines, num_top]
    return logprobs, ranks, top_ids, top_logprobs.clamp_(min=torch.finfo(torch.float32).min)


def _line_settings(rows: Tensor, settings: RowSettings, vocab_size: int) -> _LineSettings:
    num_lines, device = len(rows), rows.device
    _check_settings(len(settings.seeds), torch.int64, settings.seeds, settings.num_generated)
    _check_settings(len(settings.seeds), torch.int64, settings.top_k)
    reals = (settings.temperature, settings.top_p, settings.min_p)
    _check_settings(len(settings.seeds), torch.float64, *reals)
    temperature, top_p, min_p, uniform = (
        torch.empty(num_lines, dtype=torch.float64, device=device) for _ in range(4)
    )
    line = _LineSettings(temperature, torch.empty_like(rows), top_p, min_p, uniform)
    if num_lines:
        line_settings_kernel[(triton.cdiv(num_lines, LINES_PER_PROGRAM),)](
            rows, *settings, *line, num_lines, vocab_size, BLOCK=LINES_PER_PROGRAM, num_warps=2
        )
    return line


def _tile_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    num_lines, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    peaks = torch.empty((num_lines, num_tiles), dtype=torch.float32, device=logits.device)
    peak_ids = torch.empty_like(peaks, dtype=torch.int32)
    tile_peaks_kernel[(num_lines, num_tiles)](
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
    tile_sums_kernel[(num_lines, num_tiles)](
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
    pick_kernel[(num_lines,)](
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
    line: _LineSettings,
    peaks: Tensor,
    token_ids: Tensor,
    *,
    skip_unfiltered: bool,
) -> None:
    num_lines, vocab_size = logits.shape
    draw_filtered_kernel[(num_lines,)](
        logits,
        *line,
        peaks,
        token_ids,
        logits.stride(0),
        vocab_size,
        peaks.shape[1],
        TILES=triton.next_power_of_2(peaks.shape[1]),
        BLOCK=SEARCH_TILE,
        LANES=SEARCH_LANES,
        SKIP_UNFILTERED=skip_unfiltered,
        num_warps=SEARCH_WARPS,
    )


def _check_logits(logits: Tensor) -> tuple[int, int]:
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1 or num_lines == 0, logits.stride()
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    assert 0 < vocab_size < 2**23, vocab_size  # sums of weights must fit 63 bits
    return num_lines, vocab_size


def _check_settings(num_lines: int, dtype: torch.dtype, *settings: Tensor) -> None:
    for setting in settings:
        assert setting.shape == (num_lines,), (setting.shape, num_lines)
        assert setting.dtype == dtype, (setting.shape, num_lines)
        assert setting.is_contiguous(), setting.stride()
