"""A model whose keys and values are hashes: what it says depends on every slot that it reads.

Each token's K and V, per layer and KV head, are small whole numbers made of its history and its
position. Attention with queries of zero weighs all slots alike, so its output times their number is
the exact sum of what is read through the real block tables; the logits are a hash of all sums. One
wrong, stale, missing or foreign slot, in one head of one layer, changes them.
Knows nothing of requests, plans or compactions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from test_support.lone_run import extend_history
from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.kernels.reference.kv_store import store_ring_queries
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache, KVShape

SHAPE = KVShape(num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
GROUP = SHAPE.num_q_heads // SHAPE.num_kv_heads
MOST = 64  # numbers stay below; the mean of a few hundred is still exact enough to be rounded


def _mixed(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64 in which each bit depends on all (the finalizer of splitmix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def contents(histories: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """What tokens' slots hold: int64 [num_tokens, num_layers, 2 (K, V), num_kv_heads, head_dim]."""
    shape = (SHAPE.num_layers, 2, SHAPE.num_kv_heads, SHAPE.head_dim)
    own = np.array([history % 2**64 for history in histories], dtype=np.uint64)
    own = _mixed(own ^ _mixed(np.array(positions, dtype=np.uint64)))  # [num_tokens]
    places = np.arange(np.prod(shape), dtype=np.uint64)
    mixed = _mixed(own[:, None] + _mixed(places))  # [num_tokens, num_places]
    return (mixed % np.uint64(MOST)).astype(np.int64).reshape(-1, *shape)


class HashModel:
    """Stands in for `Decoder`. Before each forward it is told each token's history up to there."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self.backend, self.vocab_size = backend, vocab_size
        self.histories_before: list[int] = []  # by token of the batch, its own not included
        self.hidden = torch.empty(0)  # of the last forward

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Sums of what each wanted token reads, float32 [num_wanted, num_sums], whole numbers."""
        token_ids, positions = batch.token_ids.tolist(), batch.positions.tolist()
        histories = [
            extend_history(before, token_id)
            for before, token_id in zip(self.histories_before, token_ids, strict=True)
        ]
        slots = torch.from_numpy(contents(histories, positions)).float()
        sums, lses = [], []
        for layer in range(SHAPE.num_layers):
            keys, values = slots[:, layer].unbind(1)  # each [num_tokens, num_kv_heads, head_dim]
            self.backend.store_kv(cache.kv[layer], batch.slots, keys, values)
            # Read as attention reads, once for the values and once with K and V changed over.
            sums += [
                self._sum(cache.kv[layer], batch),
                self._sum(cache.kv[layer].flip(1), batch),
            ]
            lses.append(self._keep_queries(layer, keys - MOST / 2, batch, cache))
        if batch.ring_slots is not None:
            self.backend.store_lse(cache.query_lse, batch.ring_slots, torch.stack(lses))
        self.hidden = torch.cat(sums, dim=1)
        return self.hidden if batch.wanted is None else self.hidden[batch.wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_logits, vocab_size]."""
        sums = hidden.round().to(torch.int64).numpy().astype(np.uint64)  # [num_logits, num_sums]
        places = _mixed(np.arange(sums.shape[1], dtype=np.uint64))
        own = _mixed(sums + places).sum(axis=1, dtype=np.uint64)  # [num_logits]
        tokens = _mixed(np.arange(self.vocab_size, dtype=np.uint64))
        mixed = _mixed(own[:, None] ^ tokens)  # [num_logits, vocab_size]
        return torch.from_numpy((mixed % np.uint64(997)).astype(np.float32) / 200)

    def _sum(self, layer_kv: Tensor, batch: ForwardBatch) -> Tensor:
        """The values of each token's slots added up, [num_tokens, num_kv_heads * head_dim]."""
        num_tokens = len(batch.token_ids)
        query = torch.zeros(num_tokens, SHAPE.num_q_heads, SHAPE.head_dim)
        mean, lse = self.backend.attention(query, layer_kv, batch.attention_plan, 1.0, True)
        assert lse is not None
        sums = mean * lse.exp2().round()[:, :, None]  # [num_tokens, num_q_heads, head_dim]
        by_head = sums.round().view(num_tokens, SHAPE.num_kv_heads, GROUP, SHAPE.head_dim)
        assert bool((by_head == by_head[:, :, :1]).all()), "a group's query heads read differently"
        return by_head[:, :, 0].flatten(1)

    def _keep_queries(
        self, layer: int, vectors: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        """Queries for scoring; their log-sum-exps, float32 [num_tokens, num_q_heads]."""
        query = vectors.repeat_interleave(GROUP, dim=1) / MOST
        if batch.ring_slots is not None:
            store_ring_queries(cache.queries[layer], batch.ring_slots, query)
        scale = float(SHAPE.head_dim) ** -0.5
        layer_kv = cache.kv[layer]
        _, lse = self.backend.attention(query, layer_kv, batch.attention_plan, scale, True)
        assert lse is not None
        return lse


def expected_sums(held: np.ndarray, resident: dict[tuple[int, int], list[int]]) -> np.ndarray:
    """What the model must read: int64 [num_sums].

    held: `contents` of a request's tokens, by position. resident: positions by (layer, KV head).
    """
    sums = np.stack(
        [
            [held[resident[layer, head], layer, :, head].sum(axis=0) for head in _HEADS]
            for layer in range(SHAPE.num_layers)
        ]
    )  # [num_layers, num_kv_heads, 2 (K, V), head_dim]
    return sums[:, :, ::-1].transpose(0, 2, 1, 3).reshape(-1)


_HEADS = range(SHAPE.num_kv_heads)
