"""Text that a model writes to itself: sequences side by side, on a small cache of their own.

Every token is drawn at temperature 1 from a fixed random source, so equal models write the same.
Knows nothing of what the text is measured for, or of the engine's pool.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch, Backend
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.models.registry import LoadedModel

_BLOCK_SIZE = 16


class TextWriter:
    """Sequences of equal length in the making. Use it under `torch.inference_mode`.

    Sequence i owns the cache's blocks 1 + i * blocks_each and on, in order, and ring i.
    """

    cache: KVCache
    lens: Tensor  # int64 [num_sequences], device: tokens before a stop token, else max_len

    def __init__(
        self,
        loaded: LoadedModel,
        shape: KVShape,
        backend: Backend,
        *,
        num_sequences: int,
        max_len: int,
        window: int,
        starts: Sequence[Sequence[int]],
        seed: int,
        stop_tokens: Sequence[int] = (),
    ) -> None:
        """
        Args:
            max_len: tokens of a sequence, those it starts with included.
            window: newest queries of a sequence that the cache's rings keep.
            starts: token ids that a sequence starts with, at least one; given out in turn.
            stop_tokens: where a text ends; the model goes on, but `lens` stays.
        """
        self._model, self._shape, self._backend = loaded.model, shape, backend
        self._blocks_each = -(-max_len // _BLOCK_SIZE)
        device = backend.device
        self.num_sequences, self.max_len, self.num_written = num_sequences, max_len, 0
        self.cache = KVCache(
            shape,
            num_blocks=1 + num_sequences * self._blocks_each,
            block_size=_BLOCK_SIZE,
            num_query_slots=num_sequences,
            window=window,
            device=device,
        )
        self.lens = torch.full((num_sequences,), max_len, device=device)
        self._starts = _padded(starts, num_sequences).to(device)
        self._tokens = self._starts[:, 0]
        self._stops = torch.tensor(list(stop_tokens), dtype=torch.int64, device=device)
        self._generator = torch.Generator().manual_seed(seed)

    def write(self) -> None:
        """One more token of every sequence goes through the model, and the next is drawn."""
        assert self.num_written < self.max_len, f"{self.max_len} tokens are written already"
        hidden = self._model.forward(self._batch(self.num_written), self.cache)
        uniform = torch.rand(self.num_sequences, generator=self._generator, dtype=torch.float64)
        drawn = _draw(self._model.logits(hidden), uniform.to(self._backend.device))
        self.num_written += 1
        has_ended = torch.isin(drawn, self._stops)  # [num_sequences]
        if self.num_written < self._starts.shape[1]:
            given = self._starts[:, self.num_written]
            drawn = torch.where(given >= 0, given, drawn)
            has_ended &= given < 0
        self._tokens = drawn
        ends = torch.where(has_ended, self.num_written, self.max_len)
        self.lens = torch.minimum(self.lens, ends)

    def all_ended(self) -> bool:
        """Whether every sequence has met a stop token; waits for the device."""
        return bool((self.lens < self.num_written).all())

    def keys(self, layer: int) -> Tensor:
        """Keys after RoPE in token order, [num_sequences, num_written, num_kv_heads, head_dim]."""
        return self._in_order(layer, 0)

    def values(self, layer: int) -> Tensor:
        """Values in token order, shaped like `keys`."""
        return self._in_order(layer, 1)

    def ring(self, layer: int) -> Tensor:
        """Queries after RoPE, [num_sequences, window, num_q_heads, head_dim].

        Entry j is the newest query whose position is j modulo the window.
        """
        return self.cache.queries[layer].unflatten(0, (self.num_sequences, -1))

    def _in_order(self, layer: int, kind: int) -> Tensor:
        blocks = self.cache.kv[layer, 1:, kind]  # [num_blocks, block_size, num_kv_heads, head_dim]
        num_seen = -(-self.num_written // _BLOCK_SIZE)
        slots = blocks.unflatten(0, (self.num_sequences, -1))[:, :num_seen].flatten(1, 2)
        return slots[:, : self.num_written]

    def _batch(self, position: int) -> ForwardBatch:
        """One decode of every sequence at `position`."""
        shape, device = self._shape, self._backend.device
        tables = 1 + torch.arange(self.num_sequences * self._blocks_each)
        tables = tables.view(self.num_sequences, -1)  # [num_sequences, blocks_each]
        num_seen = position // _BLOCK_SIZE + 1
        attention = AttentionBatch(
            q_starts=torch.arange(self.num_sequences + 1, dtype=torch.int32),
            kv_lens=torch.full((self.num_sequences,), position + 1, dtype=torch.int32),
            block_tables=tables[:, :num_seen].int().contiguous(),
        )
        plan = self._backend.plan_attention(
            attention, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, _BLOCK_SIZE
        )
        slots = tables[:, position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
        each = torch.arange(self.num_sequences, device=device)
        window = self.cache.window
        return ForwardBatch(
            token_ids=self._tokens,
            positions=torch.full_like(each, position),
            slots=slots.to(device),
            attention_plan=plan,
            ring_slots=each * window + position % window,
            wanted=None,
            logits_index=each,
        )


def _padded(starts: Sequence[Sequence[int]], num_sequences: int) -> Tensor:
    """int64 [num_sequences, longest start], padding -1."""
    lines = [torch.tensor(list(start), dtype=torch.int64) for start in starts]
    chosen = [lines[index % len(lines)] for index in range(num_sequences)]
    return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)


def _draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per line by inverse CDF. logits: [num_lines, vocab_size]; uniform: [num_lines]."""
    cdf = logits.double().softmax(-1).cumsum(-1)
    found = torch.searchsorted(cdf, uniform[:, None])[:, 0]
    return found.clamp(max=logits.shape[1] - 1)  # rounding may leave the last sum below 1
