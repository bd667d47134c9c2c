"""From a model to its forecast of attention: how much text it writes, the samples, the fit.

Knows nothing of where a forecast is kept or of the engine's pool.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend, Forecast
from zipage_lang.runtime.forecast_fit import MIN_SAMPLES, fit_forecast
from zipage_lang.runtime.future_attention import Samples, collect_samples
from zipage_lang.runtime.kv_cache import KVShape
from zipage_lang.runtime.models.config import ArchConfig
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.models.rope import rotary_frequencies
from zipage_lang.runtime.written_text import TextWriter

log = logging.getLogger("zipage.engine")

BLOCK_LEN = 64  # queries whose attention is looked at together
MAX_ROUND_BYTES = 2**30  # of a round's cache and rings
MAX_ROUNDS = 3
NUM_SAMPLES = 49_152  # per layer and KV head, were no text to end early
MAX_SAMPLES_EACH = 64  # per text and boundary
MAX_SAMPLE_BYTES = 2**31  # of host memory for all of them
_SEED = 77


class MadeForecast(NamedTuple):
    """A forecast and, in one line, what it was made from."""

    forecast: Forecast
    about: str


@dataclasses.dataclass(frozen=True, slots=True)
class TextSize:
    """How much text is written: rounds of sequences side by side."""

    num_rounds: int
    num_sequences: int  # side by side in a round
    max_len: int  # tokens of a sequence, a multiple of block_len
    block_len: int


def choose_text_size(
    shape: KVShape,
    max_model_len: int,
    device: torch.device,
    *,
    num_texts: int | None = None,
    max_len: int | None = None,
) -> TextSize:
    """64 texts of 1,024 tokens on a card, 16 of 768 on a CPU, in rounds that fit in memory.

    Large models write fewer: there are at most three rounds, so at most 3,072 steps on a card.
    num_texts and max_len win over these defaults, and then there is no limit on rounds.
    """
    usual_num, usual_len = (64, 1024) if device.type == "cuda" else (16, 768)
    asked_len = min(max_len or usual_len, max_model_len)
    block_len = min(BLOCK_LEN, max(1, asked_len // 4))
    text_len = asked_len // block_len * block_len
    query_bytes = shape.dtype.itemsize * shape.num_layers * shape.num_q_heads * shape.head_dim
    text_bytes = shape.block_bytes(1) * text_len + query_bytes * block_len
    num_fitting = max(2, MAX_ROUND_BYTES // text_bytes)
    wanted = num_texts or min(usual_num, MAX_ROUNDS * num_fitting)
    num_rounds = -(-wanted // num_fitting)
    return TextSize(num_rounds, -(-wanted // num_rounds), text_len, block_len)


def make_forecast(
    loaded: LoadedModel,
    shape: KVShape,
    backend: Backend,
    *,
    size: TextSize | None = None,
    starts: Sequence[Sequence[int]] = (),
) -> MadeForecast:
    """The forecast of a model from text that it writes itself; takes about a minute.

    Args:
        size: of the text; None: as `choose_text_size` says.
        starts: token ids that texts start with, in turn; none: the model's own start of a text.
    """
    size = size or choose_text_size(shape, loaded.max_model_len, backend.device)
    num_texts = size.num_rounds * size.num_sequences
    log.info(
        "calibrating the forecast of attention on %d x %d tokens of the model's own text: "
        "this takes a while, once per model",
        num_texts,
        size.max_len,
    )
    frequencies = rotary_frequencies(loaded.arch, loaded.max_model_len)[0].to(backend.device)
    all_starts = starts or [[start_token(loaded.arch)]]
    rounds = [
        _one_round(loaded, shape, backend, size, all_starts, frequencies, index)
        for index in range(size.num_rounds)
    ]
    forecast, quality = _fitted(_joined(rounds), shape, frequencies)
    origin = f"{len(starts)} prompts" if starts else "no prompt"
    about = f"{num_texts} texts of up to {size.max_len} tokens from {origin}, {quality}"
    log.info("forecast of attention made from %s", about)
    return MadeForecast(forecast, about)


def forecast_by_age(shape: KVShape, frequencies: Tensor) -> Forecast:
    """The newer a token, the more it is attended to: for models of which nothing is known."""
    zeros = torch.zeros(
        (shape.num_layers, shape.num_kv_heads, shape.head_dim), device=frequencies.device
    )
    return Forecast(zeros, zeros.clone(), -torch.ones_like(zeros[..., 0]), frequencies)


def start_token(arch: ArchConfig) -> int:
    """What a text starts with: the model's start token, else the one that ends texts, else 0."""
    return next(iter([*_given(arch.bos_token_id), *arch.eos_token_ids, 0]))


def _given(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _one_round(
    loaded: LoadedModel,
    shape: KVShape,
    backend: Backend,
    size: TextSize,
    starts: Sequence[Sequence[int]],
    frequencies: Tensor,
    index: int,
) -> Samples:
    with torch.inference_mode():
        first = index * size.num_sequences
        writer = TextWriter(
            loaded,
            shape,
            backend,
            num_sequences=size.num_sequences,
            max_len=size.max_len,
            window=size.block_len,
            starts=[starts[(first + i) % len(starts)] for i in range(size.num_sequences)],
            seed=_SEED + index,
            stop_tokens=loaded.arch.eos_token_ids,
        )
    samples_each = _samples_each(shape, size)
    generator = torch.Generator().manual_seed(_SEED + index)
    samples = collect_samples(writer, frequencies, samples_each, generator)
    return dataclasses.replace(samples, sequence=samples.sequence + first)


def _samples_each(shape: KVShape, size: TextSize) -> int:
    """Slots per text and boundary."""
    num_boundaries = size.max_len // size.block_len - 1
    num_places = max(1, size.num_rounds * size.num_sequences * num_boundaries)
    num_samples = min(NUM_SAMPLES, MAX_SAMPLE_BYTES // shape.block_bytes(1))
    return max(1, min(MAX_SAMPLES_EACH, num_samples // num_places))


def _joined(rounds: list[Samples]) -> Samples:
    return Samples(
        key=torch.cat([one.key for one in rounds], dim=1),
        value=torch.cat([one.value for one in rounds], dim=1),
        target=torch.cat([one.target for one in rounds], dim=1),
        age=torch.cat([one.age for one in rounds]),
        sequence=torch.cat([one.sequence for one in rounds]),
    )


def _fitted(samples: Samples, shape: KVShape, frequencies: Tensor) -> tuple[Forecast, str]:
    """The fit and a word on it; where the texts ended too early for one, a forecast by age."""
    num_samples = len(samples.age)
    if num_samples < MIN_SAMPLES or len(samples.sequence.unique()) < 2:
        log.warning(
            "the model's own texts were too short for a forecast (%d samples, %d are needed): "
            "newer tokens are kept; make one from prompts with `zipage calibrate`",
            num_samples,
            MIN_SAMPLES,
        )
        return forecast_by_age(shape, frequencies), "too short for a fit, by age alone"
    fit = fit_forecast(samples, frequencies)
    ranks = fit.rank_correlation
    quality = (
        f"{num_samples} samples; rank correlation on texts held out {float(ranks.median()):.2f} "
        f"({ranks.numel()} heads, {float(ranks.min()):.2f} to {float(ranks.max()):.2f})"
    )
    return fit.forecast, quality
