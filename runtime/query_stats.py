"""Measures what a model's queries are like, on text that the model itself writes.

A few sequences are drawn side by side at temperature 1 on a small cache of their own; each step's
queries are turned back by their position's angles and added up.
Knows nothing of requests, policies' scores or the engine's pool.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch, Backend
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.models.rope import rotary_frequencies
from zipage_lang.runtime.policies.policy import QueryStats

NUM_SEQUENCES = 16
SEQUENCE_LEN = 64
_BLOCK_SIZE = 16
_SEED = 20260


class QueryStatsSource:
    """The statistics, measured at the first `prepare`: it takes seconds and runs the model."""

    def __init__(self, measure: Callable[[], QueryStats]) -> None:
        self._measure = measure
        self._stats: QueryStats | None = None

    def prepare(self) -> None:
        if self._stats is None:
            self._stats = self._measure()

    def get(self) -> QueryStats:
        assert self._stats is not None, "a policy that needs query statistics was not prepared"
        return self._stats


@torch.inference_mode()
def measure_query_stats(
    loaded: LoadedModel, shape: KVShape, backend: Backend, start_token: int
) -> QueryStats:
    """Statistics over NUM_SEQUENCES times SEQUENCE_LEN queries per layer and head.

    start_token: what every sequence starts with, such as the end of a text.
    """
    num_steps = min(SEQUENCE_LEN, loaded.max_model_len)
    cache = _small_cache(shape, num_steps, backend.device)
    frequencies = rotary_frequencies(loaded.arch, loaded.max_model_len)[0].to(backend.device)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.full((NUM_SEQUENCES,), start_token, device=backend.device)
    center = torch.zeros_like(cache.queries[:, 0], dtype=torch.float32)
    length = center[..., : shape.head_dim // 2].clone()
    for step in range(num_steps):
        hidden = loaded.model.forward(_batch(backend, shape, tokens, step, num_steps), cache)
        uniform = torch.rand(NUM_SEQUENCES, generator=generator, dtype=torch.float64)
        tokens = _draw(loaded.model.logits(hidden), uniform.to(backend.device))
        turned = turn_back(cache.queries.float(), frequencies * step)
        center += turned.sum(1)
        length += torch.hypot(*turned.chunk(2, dim=-1)).sum(1)
    count = NUM_SEQUENCES * num_steps
    return QueryStats(center / count, length / count, frequencies)


def turn_back(q: Tensor, angles: Tensor) -> Tensor:
    """Queries without their rotation. q: [.., head_dim]; angles: [head_dim / 2], of its place."""
    low, high = q.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos + high * sin, high * cos - low * sin], dim=-1)


def _small_cache(shape: KVShape, num_steps: int, device: torch.device) -> KVCache:
    """Room for all sequences; a ring holds the queries of the newest step."""
    return KVCache(
        shape,
        num_blocks=1 + NUM_SEQUENCES * _blocks_each(num_steps),
        block_size=_BLOCK_SIZE,
        num_query_slots=NUM_SEQUENCES,
        window=1,
        device=device,
    )


def _blocks_each(num_steps: int) -> int:
    return -(-num_steps // _BLOCK_SIZE)


def _batch(
    backend: Backend, shape: KVShape, tokens: Tensor, step: int, num_steps: int
) -> ForwardBatch:
    """One decode of every sequence at position `step`; sequence i owns a run of blocks."""
    blocks_each = _blocks_each(num_steps)
    tables = 1 + torch.arange(NUM_SEQUENCES * blocks_each).view(NUM_SEQUENCES, -1)
    num_seen = step // _BLOCK_SIZE + 1
    attention = AttentionBatch(
        q_starts=torch.arange(NUM_SEQUENCES + 1, dtype=torch.int32),
        kv_lens=torch.full((NUM_SEQUENCES,), step + 1, dtype=torch.int32),
        block_tables=tables[:, :num_seen].int().contiguous(),
    )
    plan = backend.plan_attention(
        attention, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, _BLOCK_SIZE
    )
    slots = tables[:, step // _BLOCK_SIZE] * _BLOCK_SIZE + step % _BLOCK_SIZE
    each = torch.arange(NUM_SEQUENCES, device=backend.device)
    return ForwardBatch(
        token_ids=tokens,
        positions=torch.full_like(each, step),
        slots=slots.to(backend.device),
        attention_plan=plan,
        ring_slots=each,
        logits_index=each,
    )


def _draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per line by inverse CDF. logits: [num_lines, vocab_size]; uniform: [num_lines]."""
    cdf = logits.double().softmax(-1).cumsum(-1)
    found = torch.searchsorted(cdf, uniform[:, None])[:, 0]
    return found.clamp(max=logits.shape[1] - 1)  # rounding may leave the last sum below 1
