"""Drawing tokens from logits: random stream, penalties, filters, the draw, and log-probabilities.

Every random or filtered choice is made on integer weights `floor(2^40 * exp((x - max x) / T))`.
Integer sums are exact in any order, so what a line draws depends on that line alone: not on how
many lines run beside it, nor on how much of the vocabulary was sorted to find its filters' edge.
Knows nothing of requests, rows or which settings a caller may choose.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from zipage_lang.kernels.backend import RowSettings

WEIGHT_ONE = 2.0**40  # weight of the likeliest token; sums over 2^23 tokens still fit 63 bits
FIRST_WIDTH = 256  # tokens sorted before asking whether top-p reaches further
MIN_TEMPERATURE = 1e-6  # below, float32 quotients overflow; the draw is greedy long before

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's odd step, as a signed 64-bit integer
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def random_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per line: number `position` of the stream that `seed` names.

    Args:
        seeds: int64 [num_lines], any bits.
        positions: int64 [num_lines], tokens the line has drawn before.
    Returns:
        float64 [num_lines], multiples of 2^-53.
    Source: the splitmix64 finaliser (Steele, Lea, Flood 2014), applied to the seed first so that
    neighbouring seeds do not give shifted copies of one stream.
    """
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)  # [num_lines]
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def penalize(
    logits: Tensor,
    in_prompt: Tensor,
    num_generated: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits after the repetition, presence and frequency penalties, in this order.

    Repetition divides positive and multiplies negative logits of tokens in the prompt or the
    output (CTRL, Keskar et al. 2019, section 4.1); presence and frequency are subtracted for
    tokens of the output alone, once and per occurrence.

    Args:
        logits: float32 [num_lines, vocab_size].
        in_prompt: bool [num_lines, vocab_size].
        num_generated: int32 [num_lines, vocab_size], occurrences in the output.
        repetition, presence, frequency: float [num_lines]; neutral at 1, 0, 0.
    Returns:
        float32 [num_lines, vocab_size].
    """
    by = repetition.to(logits.dtype)[:, None]  # [num_lines, 1]
    generated = num_generated > 0  # [num_lines, vocab_size]
    repeated = torch.where(logits < 0, logits * by, logits / by)
    out = torch.where(in_prompt | generated, repeated, logits)  # [num_lines, vocab_size]
    out = out - presence.to(logits.dtype)[:, None] * generated
    return out - frequency.to(logits.dtype)[:, None] * num_generated


def draw_tokens(logits: Tensor, temperature: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverse CDF over the vocabulary in its own order; sorts nothing.

    Args:
        logits: float32 [num_lines, vocab_size], finite or -inf, one finite per line at least.
        temperature: float [num_lines], above 0.
        min_p: float [num_lines]; tokens under this share of the likeliest's probability are out.
        uniform: float64 [num_lines] in [0, 1).
    Returns:
        int64 [num_lines], token ids.
    """
    weights = _token_weights(logits, temperature)  # [num_lines, vocab_size]
    return _pick(_drop_below(weights, min_p), uniform)


def draw_filtered_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    max_top_k: int,
) -> Tensor:
    """Draw after temperature, then top-k, then top-p (of what top-k left), then min-p.

    Ties go to the lower token id, so exactly k tokens pass top-k. Top-p keeps the smallest set of
    likeliest tokens whose probability reaches `top_p`.

    Args:
        logits, temperature, min_p, uniform: as `draw_tokens`.
        top_k: int64 [num_lines]; vocab_size and above is off.
        top_p: float64 [num_lines] in (0, 1]; 1 is off.
        max_top_k: the largest of `top_k`, known to the host; bounds what must be sorted.
    Returns:
        int64 [num_lines], token ids.
    """
    weights = _token_weights(logits, temperature)  # [num_lines, vocab_size]
    mass = weights.sum(-1, keepdim=True)  # [num_lines, 1]
    top_k, top_p = top_k[:, None], top_p[:, None]  # [num_lines, 1]
    for width, is_last in _sort_widths(min(max_top_k, logits.shape[1]), logits.device):
        token_ids = likeliest_tokens(logits, width)  # [num_lines, width]
        kept = weights.gather(1, token_ids) * (torch.arange(width, device=logits.device) < top_k)
        reach = kept.cumsum(-1)  # [num_lines, width]
        need = top_p * torch.where(top_k <= width, reach[:, -1:], mass)  # float64 [num_lines, 1]
        no_top_k = top_k >= logits.shape[1]  # the others' mass is known once width spans top_k
        if is_last or bool(((top_k <= width) | (no_top_k & (reach[:, -1:] >= need))).all()):
            break
    kept = kept * (reach - kept < need)  # [num_lines, width]
    columns = _pick(_drop_below(kept, min_p), uniform)
    return token_ids.gather(1, columns[:, None])[:, 0]


def draw_rows(logits: Tensor, rows: Tensor, settings: RowSettings, max_top_k: int) -> Tensor:
    """Draw one token per line with the settings of its row, and move the rows on by it.

    This twin waits for the device; the Triton act does not.

    Args:
        logits: float [num_lines, vocab_size].
        rows: int64 [num_lines], distinct, into the tensors of `settings`; a negative row's draw is
            arbitrary and moves nothing on.
        settings: see `RowSettings`; writes into `last_token_ids` and `num_generated`.
        max_top_k: the largest of the lines' `top_k`; 0 where no line has top_k or top_p.
    Returns:
        int64 [2, num_lines]: token ids, and 1 where the line's logits hold NaN or +inf or nothing
        but -inf, else 0; such a line's token is arbitrary.
    """
    drawn = pick_tokens(logits, rows, settings, max_top_k)
    move_rows_on(rows, drawn[0], settings)
    return drawn


def pick_tokens(logits: Tensor, rows: Tensor, settings: RowSettings, max_top_k: int) -> Tensor:
    """What `draw_rows` returns; moves nothing on."""
    logits = logits.float()  # [num_lines, vocab_size]
    best, token_ids = logits.max(-1)  # [num_lines] each
    lines = RowSettings(*(setting[rows.clamp(min=0)] for setting in settings))  # [num_lines] each
    is_random = (lines.temperature > 0) & (rows >= 0)  # [num_lines]
    if is_random.any():
        _draw_random(logits, lines, is_random, max_top_k, token_ids)
    return torch.stack((token_ids, (~best.isfinite()).long()))


def move_rows_on(rows: Tensor, token_ids: Tensor, settings: RowSettings) -> None:
    """Each row but negative ones has drawn its token: all rows move on, or none with an error."""
    is_real = rows >= 0
    rows, token_ids = rows[is_real], token_ids[is_real]
    counts = settings.num_generated[rows] + 1
    settings.last_token_ids.index_copy_(0, rows, token_ids)
    settings.num_generated.index_copy_(0, rows, counts)


def score_tokens(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities (natural log) of one token per line and of the likeliest ones.

    Args:
        logits: float32, bfloat16 or float16 [num_lines, vocab_size]; scored in float32.
        token_ids: int64 [num_lines].
        num_top: how many of the likeliest to report.
    Returns:
        logprobs: float32 [num_lines]; a probability of 0 is reported as float32's lowest number.
        ranks: int64 [num_lines], 1 is the likeliest; ties go to the lower token id.
        top_ids: int64 [num_lines, num_top], likeliest first, ties to the lower token id.
        top_logprobs: float32 [num_lines, num_top].
    """
    logits = logits.float()  # [num_lines, vocab_size]
    logprobs = torch.log_softmax(logits, -1).clamp_(min=torch.finfo(torch.float32).min)
    token_ids = token_ids[:, None]  # [num_lines, 1]
    chosen = logits.gather(1, token_ids)
    lower = torch.arange(logits.shape[1], device=logits.device) < token_ids
    ahead = (logits > chosen) | ((logits == chosen) & lower)  # [num_lines, vocab_size]
    top_ids = likeliest_tokens(logits, num_top)
    return (
        logprobs.gather(1, token_ids)[:, 0],
        ahead.sum(-1) + 1,
        top_ids,
        logprobs.gather(1, top_ids),
    )


def likeliest_tokens(logits: Tensor, width: int) -> Tensor:
    """The `width` largest logits' token ids per line, largest first, ties to the lower id.

    float32 [num_lines, vocab_size] -> int64 [num_lines, width].
    """
    vocab_size = logits.shape[1]
    if width >= vocab_size:
        return torch.sort(logits, dim=-1, descending=True, stable=True).indices
    bits = (logits + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0, which it equals
    rank_bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # int32 order is now float order
    keys = rank_bits.to(torch.int64).mul_(2**32)  # [num_lines, vocab_size]
    keys.add_(torch.arange(vocab_size - 1, -1, -1, device=logits.device))
    return vocab_size - 1 - (keys.topk(width, dim=-1).values & 0xFFFFFFFF)


def _draw_random(
    logits: Tensor, lines: RowSettings, is_random: Tensor, max_top_k: int, token_ids: Tensor
) -> None:
    """Draws for the lines that are random, into `token_ids`. `lines`: settings by line."""
    uniform = random_uniform(lines.seeds, lines.num_generated)  # [num_lines]
    is_filtered = (lines.top_k < logits.shape[1]) | (lines.top_p < 1)  # [num_lines]
    plain = is_random & ~is_filtered
    if plain.any():
        token_ids[plain] = draw_tokens(
            logits[plain], lines.temperature[plain], lines.min_p[plain], uniform[plain]
        )
    filtered = is_random & is_filtered
    if max_top_k and filtered.any():
        token_ids[filtered] = draw_filtered_tokens(
            logits[filtered],
            lines.temperature[filtered],
            lines.top_k[filtered],
            lines.top_p[filtered],
            lines.min_p[filtered],
            uniform[filtered],
            max_top_k,
        )


def _sort_widths(bound: int, device: torch.device) -> Iterator[tuple[int, bool]]:
    """How many of the likeliest tokens to sort, tried in turn; the last always suffices.

    Only the CPU tries small widths first: elsewhere the question would wait for the device.
    """
    width = FIRST_WIDTH
    while device.type == "cpu" and width < bound:
        yield width, False
        width *= 8
    yield bound, True


def _token_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    scale = temperature.to(torch.float32).clamp(min=MIN_TEMPERATURE)[:, None]  # [num_lines, 1]
    best = logits.amax(-1, keepdim=True)  # [num_lines, 1]
    shares = (logits - best).div_(scale).exp_()  # [num_lines, vocab_size], 1 for the likeliest
    return shares.mul_(WEIGHT_ONE).to(torch.int64)


def _drop_below(weights: Tensor, min_p: Tensor) -> Tensor:
    floor = (min_p.to(torch.float64) * WEIGHT_ONE).ceil_().to(torch.int64)
    return weights.masked_fill_(weights < floor[:, None], 0)


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Column i with probability weights[i] / sum: the first whose running sum passes the target.

    A column of weight 0 adds nothing to the running sum, so it can never be the first.
    """
    reach = weights.cumsum(-1)  # [num_lines, num_columns]
    # uniform is at most 1 - 2^-53, so even a rounded product stays below the total
    target = (uniform[:, None] * reach[:, -1:]).to(torch.int64)  # [num_lines, 1]
    columns = torch.searchsorted(reach, target, right=True)[:, 0]
    return columns.clamp_(max=weights.shape[1] - 1)  # logits that are NaN may point past the end


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: torch's own fills with copies of the sign."""
    return (bits >> by) & (2 ** (64 - by) - 1)
