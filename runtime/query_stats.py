"""Measures what a model's queries are like, on text that the model itself writes.

Each step's queries are turned back by their position's angles and added up.
Knows nothing of requests, policies' scores or the engine's pool.
"""

import torch

from zipage_lang.kernels.backend import Backend
from zipage_lang.kernels.reference.fused_ops import turn_back
from zipage_lang.runtime.kv_cache import KVShape
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.models.rope import rotary_frequencies
from zipage_lang.runtime.policies.policy import QueryStats
from zipage_lang.runtime.written_text import TextWriter

NUM_SEQUENCES = 16
SEQUENCE_LEN = 64
_SEED = 20260


@torch.inference_mode()
def measure_query_stats(
    loaded: LoadedModel, shape: KVShape, backend: Backend, start_token: int
) -> QueryStats:
    """Statistics over NUM_SEQUENCES times SEQUENCE_LEN queries per layer and head.

    start_token: what every sequence starts with, such as the end of a text.
    """
    writer = TextWriter(
        loaded,
        shape,
        backend,
        num_sequences=NUM_SEQUENCES,
        max_len=min(SEQUENCE_LEN, loaded.max_model_len),
        window=1,
        starts=[[start_token]],
        seed=_SEED,
    )
    queries = writer.cache.queries  # [num_layers, NUM_SEQUENCES, num_q_heads, head_dim]
    frequencies = rotary_frequencies(loaded.arch, loaded.max_model_len)[0].to(backend.device)
    center = torch.zeros_like(queries[:, 0], dtype=torch.float32)
    length = center[..., : shape.head_dim // 2].clone()
    for step in range(writer.max_len):
        writer.write()
        turned = turn_back(queries.float(), frequencies * step)
        center += turned.sum(1)
        length += torch.hypot(*turned.chunk(2, dim=-1)).sum(1)
    count = NUM_SEQUENCES * writer.max_len
    return QueryStats(center / count, length / count, frequencies)
