"""From a plan's chunks to a ForwardBatch: the one place where a plan's ints become device tensors.

Knows nothing of requests, models or sampling settings.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch, Backend
from zipage_lang.runtime.device_copy import send_array
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.step_plan import Chunk
from zipage_lang.runtime.wanted_states import wanted_tokens


class BatchBuilder:
    """Flattens the chunks of a step over tokens, in plan order."""

    def __init__(self, cache: KVCache, backend: Backend, tables: RowTables) -> None:
        self._cache, self._backend, self._tables = cache, backend, tables

    def build(self, chunks: Sequence[Chunk], last_token_ids: Tensor) -> ForwardBatch:
        """`last_token_ids`: int64 [max_rows] on the device, the token each row drew last."""
        lens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lens)])  # [num_chunks + 1]
        rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
        owner = np.repeat(np.arange(len(chunks)), lens)  # [num_tokens]
        offset = np.arange(starts[-1]) - starts[owner]  # [num_tokens], place within the chunk
        positions = np.array([chunk.position for chunk in chunks])[owner] + offset
        resident_starts = np.array([chunk.resident_start for chunk in chunks])
        tables = self._tables.of_rows(rows)
        wanted = wanted_tokens(chunks, starts)  # [num_wanted]
        return ForwardBatch(
            token_ids=self._token_ids(chunks, starts, last_token_ids),
            positions=self._to_device(positions),
            slots=self._to_device(self._slots(tables, owner, resident_starts[owner] + offset)),
            attention_plan=self._plan_attention(tables, starts, resident_starts + lens),
            ring_slots=self._ring_slots(chunks, starts),
            wanted=None if len(wanted) == starts[-1] else self._to_device(wanted),
            logits_index=self._to_device(self._logits_index(chunks, starts, wanted)),
        )

    def _token_ids(self, chunks: Sequence[Chunk], starts: np.ndarray, last: Tensor) -> Tensor:
        """Known tokens come from the plan, a row's last drawn one from the device."""
        token_ids = np.zeros(starts[-1], dtype=np.int64)
        drawn = []
        for index, chunk in enumerate(chunks):
            if chunk.token_ids is None:
                drawn.append(index)
            else:
                token_ids[starts[index] : starts[index + 1]] = chunk.token_ids
        tokens = self._to_device(token_ids)  # [num_tokens]
        if drawn:
            rows = self._to_device(np.array([chunks[index].row for index in drawn], dtype=np.int64))
            tokens[self._to_device(starts[drawn])] = last[rows]
        return tokens

    def _slots(self, tables: np.ndarray, owner: np.ndarray, resident: np.ndarray) -> np.ndarray:
        block_ids = tables[owner, resident // self._cache.block_size].astype(np.int64)
        assert block_ids.min(initial=1) > 0, "a token's slot is not in its row's block table"
        return block_ids * self._cache.block_size + resident % self._cache.block_size

    def _plan_attention(
        self, tables: np.ndarray, starts: np.ndarray, kv_lens: np.ndarray
    ) -> object:
        shape = self._cache.shape
        batch = AttentionBatch(
            q_starts=torch.from_numpy(starts.astype(np.int32)),
            kv_lens=torch.from_numpy(kv_lens.astype(np.int32)),
            block_tables=torch.from_numpy(np.ascontiguousarray(tables)),
        )
        return self._backend.plan_attention(
            batch, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, self._cache.block_size
        )

    def _ring_slots(self, chunks: Sequence[Chunk], starts: np.ndarray) -> Tensor | None:
        """The last `window` tokens of each chunk that has a query slot keep their queries."""
        if all(chunk.query_slot is None for chunk in chunks):
            return None
        window = self._cache.window
        ring_slots = np.full(starts[-1], -1, dtype=np.int64)  # [num_tokens]
        for index, chunk in enumerate(chunks):
            if chunk.query_slot is None:
                continue
            kept = np.arange(max(0, chunk.num_tokens - window), chunk.num_tokens)
            entries = chunk.query_slot * window + (chunk.position + kept) % window
            ring_slots[starts[index] + kept] = entries
        return self._to_device(ring_slots)

    def _logits_index(
        self, chunks: Sequence[Chunk], starts: np.ndarray, wanted: np.ndarray
    ) -> np.ndarray:
        """Where the last token of each chunk that draws stands among the wanted ones."""
        ends = [starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.sample_rows]
        return np.searchsorted(wanted, np.array(ends, dtype=np.int64))

    def _to_device(self, values: np.ndarray) -> Tensor:
        return send_array(values, self._backend.device)
