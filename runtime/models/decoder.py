"""Decoder: embeddings, layers and the output head, run over a ForwardBatch and a paged KV cache.

Knows nothing of weight files, families of models or requests.
"""

from typing import Any

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.models.config import ArchConfig
from zipage_lang.runtime.models.layers import DecoderLayer
from zipage_lang.runtime.models.rope import RotaryTable


class Decoder:
    """A decoder-only transformer for inference."""

    def __init__(
        self,
        arch: ArchConfig,
        backend: Backend,
        *,
        embedding: Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        head: Any,
        rotary: RotaryTable,
    ) -> None:
        self.arch, self.backend = arch, backend
        self.embedding = embedding  # [vocab_size, hidden_size]
        self.layers = layers
        self.final_norm = final_norm  # [hidden_size]
        self.head = head  # from Backend.prepare_linear, hidden_size to vocab_size
        self.rotary = rotary

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run all layers; K, V and the kept queries are written into `cache`.

        Queries go there layer by layer, their log-sum-exps at the end: one launch for all layers.

        Returns the wanted hidden states after the final norm, [num_wanted, hidden_size].
        """
        backend, eps = self.backend, self.arch.rms_norm_eps
        rotary = self.rotary.at(batch.positions)
        embedded = self.embedding.index_select(0, batch.token_ids)  # [num_tokens, hidden_size]
        stream = backend.open_stream(embedded, eps)
        lse = self._lse_memory(batch)
        for layer in self.layers:
            wanted = batch.wanted if layer is self.layers[-1] else None
            stream = layer(stream, rotary, batch, cache, backend, lse, wanted)
        if batch.ring_slots is not None and lse is not None:
            backend.store_lse(cache.query_lse, batch.ring_slots, lse)
        # Not prepared into the head: that may be the embedding, and to copy it costs over 1 GB.
        return backend.normed_stream(stream, self.final_norm)

    def _lse_memory(self, batch: ForwardBatch) -> Tensor | None:
        """float32 [num_layers, num_tokens, num_q_heads] for this step; None: no query is kept."""
        if batch.ring_slots is None:
            return None
        shape = (len(self.layers), len(batch.token_ids), self.arch.num_q_heads)
        return torch.empty(shape, dtype=torch.float32, device=batch.token_ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_logits, vocab_size], of the weights' dtype, from normed hidden states.

        hidden: [num_logits, hidden_size].
        """
        return self.backend.linear(hidden, self.head)
