"""Drawing tokens from logits in Triton: random stream, penalties, filters, draw, log-probabilities.

Same acts as `reference/sampling.py`. What a filter keeps is decided on the same integer weights,
summed exactly; a plain draw takes its tile by float32 sums of a fixed order, then its token by
integers. So a draw equals the twin's unless the random number falls within the rounding of `exp` (a
relative 1e-5 of the total) of the edge between two tokens, or a filter's edge does; random numbers,
greedy choices, ranks and top tokens are always equal. A line's draw depends on that line alone. No
launch waits for the device or allocates by what the data says.
Knows nothing of requests, rows or which settings a caller may choose.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.backend import RowSettings
from zipage_lang.kernels.dependent_launch import launch_options
from zipage_lang.kernels.draw_kernels import pick_kernel, tile_masses_kernel, tile_sums_kernel
from zipage_lang.kernels.filter_kernels import draw_filtered_kernel
from zipage_lang.kernels.logprob_kernels import line_scores_kernel, tile_scores_kernel
from zipage_lang.kernels.sampling_kernels import (
    ALL_LINES,
    NO_LINES,
    SOME_LINES,
    penalize_kernel,
    random_uniform_kernel,
)

TILE = 4096  # 38 tiles of a 151,936 vocabulary: one line alone still fills 38 multiprocessors
TILE_WARPS = 8
MASS_WARPS = 2  # 64 logits a thread: fewest instructions a logit, 96 KB on their way to each of 132
PICK_WARPS = 8
GROUP = 128  # tokens whose highest logit stands for them until one of them is taken
SEARCH_BLOCK, SEARCH_LANES, SEARCH_PIVOTS = 2048, 8, 8
SWEEP_BLOCK, COLLECT_BLOCK = 4096, 8192  # a sweep's sums: 64 registers in each of 512 threads
SEARCH_WARPS = 16
LINES_PER_PROGRAM = 64
KEY_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits that are alike


class _Lines(NamedTuple):
    """Where the lines of one draw find their settings: by row, or by line where `rows` is None."""

    rows: Tensor | None  # int64 [num_lines]
    seeds: Tensor | None  # this and all below: types as in `RowSettings`, None is neutral
    num_generated: Tensor | None
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor
    last_token_ids: Tensor | None  # None: rows are not moved on
    uniform: Tensor | None  # float64 [num_lines] in [0, 1); None: made of seed and num_generated


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

    Two launches: each tile's maximum and its sum of weights; the tile and the token in it. Reads
    the logits once, and of lines with min-p those tiles again that hold a token it keeps.

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
    lines = _Lines(None, None, None, temperature, None, None, min_p, None, uniform)
    return _draw(logits, lines, NO_LINES)[0]


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
    drawn place is searched. Mostly one or two passes over a line leave a list of up to
    SEARCH_BLOCK tokens that all searches share; where more pass the filters, each search reads the
    line three to five times. Only lines with more equal logits than a list holds are slow: tens
    of passes. One program a line.

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
    lines = _Lines(None, None, None, temperature, top_k, top_p, min_p, None, uniform)
    return _draw(logits, lines, ALL_LINES)[0]


def draw_rows(logits: Tensor, rows: Tensor, settings: RowSettings, max_top_k: int) -> Tensor:
    """Draw one token per line with the settings of its row, and move the rows on by it.

    Greedy, plain and filtered lines alike: two launches that read the logits once, four where some
    row filters, whose lines are read again for top-p's sum and per pass of their searches (see
    `draw_filtered_tokens`).

    Args:
        logits: float32, bfloat16 or float16 [num_lines, vocab_size].
        rows: int64 [num_lines], distinct, into the tensors of `settings`; a negative row's draw is
            arbitrary and moves nothing on.
        settings: see `RowSettings`; writes into `last_token_ids` and `num_generated`.
        max_top_k: 0 where the host knows that no row has top_k or top_p; else any other number.
    Returns:
        int64 [2, num_lines]: token ids, and 1 where the line's logits hold NaN or +inf or nothing
        but -inf, else 0; such a line's token is arbitrary.
    """
    num_lines, _ = _check_logits(logits)
    _check_settings(num_lines, torch.int64, rows)
    num_rows = len(settings.seeds)
    integers = (settings.seeds, settings.num_generated, settings.top_k, settings.last_token_ids)
    _check_settings(num_rows, torch.int64, *integers)
    reals = (settings.temperature, settings.top_p, settings.min_p)
    _check_settings(num_rows, torch.float64, *reals)
    return _draw(logits, _Lines(rows, *settings, None), SOME_LINES if max_top_k else NO_LINES)


def score_tokens(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities (natural log) of one token per line and of the likeliest ones.

    Two launches that read the logits once. The likeliest are taken one by one, by the highest
    logit of each group of GROUP tokens: meant for tens of them.

    Args:
        logits: float32, bfloat16 or float16 [num_lines, vocab_size].
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
    device, num_tiles, num_top = (
        logits.device,
        triton.cdiv(vocab_size, TILE),
        min(num_top, vocab_size),
    )
    peaks = torch.empty((num_lines, num_tiles), dtype=torch.float32, device=device)
    sums, ahead = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    num_groups = num_tiles * (TILE // GROUP)
    group_keys = torch.empty((num_lines, num_groups), dtype=torch.int32, device=device)
    logprobs = torch.empty(num_lines, dtype=torch.float32, device=device)
    ranks = torch.empty_like(token_ids)
    top_ids = torch.empty((num_lines, num_top), dtype=torch.int64, device=device)
    top_logprobs = torch.empty_like(top_ids, dtype=torch.float32)
    if num_lines:
        shape = (logits.stride(0), vocab_size)
        tile_scores_kernel[(num_lines, num_tiles)](
            logits,
            token_ids,
            peaks,
            sums,
            ahead,
            group_keys,
            *shape,
            BLOCK=TILE,
            GROUP=GROUP,
            HAS_TOP=num_top > 0,
            num_warps=TILE_WARPS,
        )
        line_scores_kernel[(num_lines,)](
            logits,
            token_ids,
            peaks,
            sums,
            ahead,
            group_keys,
            logprobs,
            ranks,
            top_ids,
            top_logprobs,
            *shape,
            num_tiles,
            num_groups,
            num_top,
            TILES=triton.next_power_of_2(num_tiles),
            GROUPS=triton.next_power_of_2(num_groups),
            GROUP=GROUP,
            HAS_TOP=num_top > 0,
            num_warps=4,
        )
    return logprobs, ranks, top_ids, top_logprobs


def _draw(logits: Tensor, lines: _Lines, filters: tl.constexpr) -> Tensor:
    """int64 [2, num_lines], as `draw_rows`."""
    (num_lines, vocab_size), device = logits.shape, logits.device
    num_tiles = triton.cdiv(vocab_size, TILE)
    drawn = torch.empty((2, num_lines), dtype=torch.int64, device=device)
    if num_lines == 0:
        return drawn
    peaks = torch.empty((num_lines, num_tiles), dtype=torch.float32, device=device)
    masses = torch.empty_like(peaks)
    # All memory is taken before the first launch that moves rows on.
    lists = None if filters.value == NO_LINES.value else _empty_lists(num_lines, num_tiles, device)
    shape, early = (logits.stride(0), vocab_size, num_tiles), launch_options(device)
    tile_masses_kernel[(num_tiles, num_lines)](
        logits,
        lines.rows,
        lines.temperature,
        peaks,
        masses,
        *shape,
        BLOCK=TILE,
        num_warps=MASS_WARPS,
        **early,
    )
    pick_kernel[(num_lines,)](
        logits,
        *lines,
        peaks,
        masses,
        drawn,
        *shape,
        FILTERS=filters.value,
        TILES=triton.next_power_of_2(num_tiles),
        BLOCK=TILE,
        num_warps=PICK_WARPS,
        **early,
    )
    if lists is not None:
        _draw_filtered(logits, lines, filters, peaks, lists, drawn)
    return drawn


def _empty_lists(num_lines: int, num_tiles: int, device: torch.device) -> tuple[Tensor, ...]:
    """Scratch of a filtered draw: sums by tile, listed tokens, how many are listed."""
    return (
        torch.empty((num_lines, num_tiles), dtype=torch.int64, device=device),
        torch.empty((num_lines, SEARCH_BLOCK), dtype=torch.int32, device=device),
        torch.empty(num_lines, dtype=torch.int32, device=device),
    )


def _draw_filtered(
    logits: Tensor,
    lines: _Lines,
    filters: tl.constexpr,
    peaks: Tensor,
    lists: tuple[Tensor, ...],
    drawn: Tensor,
) -> None:
    """Draws for the lines that filter."""
    (num_lines, vocab_size), num_tiles = logits.shape, peaks.shape[1]
    shape = (logits.stride(0), vocab_size, num_tiles)
    sizes = {"FILTERS": filters.value, "TILES": triton.next_power_of_2(num_tiles)}
    sums, ids, num_listed = lists
    tile_sums_kernel[(num_tiles, num_lines)](
        logits,
        lines.rows,
        lines.temperature,
        lines.top_k,
        lines.top_p,
        lines.min_p,
        peaks,
        sums,
        *shape,
        **sizes,
        BLOCK=TILE,
        num_warps=TILE_WARPS,
    )
    draw_filtered_kernel[(num_lines,)](
        logits,
        *lines,
        peaks,
        sums,
        ids,
        num_listed,
        drawn,
        *shape,
        **sizes,
        SHIFT=KEY_SHIFTS[logits.dtype],
        BLOCK=SEARCH_BLOCK,
        LANES=SEARCH_LANES,
        PIVOTS=SEARCH_PIVOTS,
        SWEEP_BLOCK=SWEEP_BLOCK,
        COLLECT_BLOCK=COLLECT_BLOCK,
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
