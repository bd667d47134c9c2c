"""A step's sequences as numpy arrays, and the index that FlashInfer is given of them.

Knows nothing of launches, queries or the device.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import Heads, SequenceIndex


@dataclasses.dataclass(frozen=True, slots=True)
class HostRows:
    """An AttentionBatch as numpy arrays, with what FlashInfer's index needs of each sequence."""

    q_lens: np.ndarray  # int32 [num_seqs]
    kv_lens: np.ndarray  # int32 [num_seqs]
    tables: np.ndarray  # int32 [num_seqs, max_blocks], padding -1

    @classmethod
    def of(cls, batch: AttentionBatch) -> "HostRows":
        q_lens = np.diff(batch.q_starts.numpy())
        kv_lens = batch.kv_lens.numpy()
        is_right = (q_lens >= 1) & (kv_lens >= q_lens)  # [num_seqs]
        assert is_right.all(), f"{q_lens=} {kv_lens=}"
        return cls(q_lens, kv_lens, batch.block_tables.numpy())

    @property
    def num_seqs(self) -> int:
        return len(self.q_lens)

    @property
    def num_leading_decodes(self) -> int:
        longer = np.flatnonzero(self.q_lens > 1)
        return int(longer[0]) if len(longer) else self.num_seqs

    def sliced(self, first: int, end: int) -> "HostRows":
        rows = slice(first, end)
        return HostRows(self.q_lens[rows], self.kv_lens[rows], self.tables[rows])

    def padded(self, num_rows: int) -> "HostRows":
        """With decodes of one slot in block 0 added, up to num_rows."""
        missing = num_rows - self.num_seqs
        assert missing >= 0, f"{self.num_seqs} rows in a bucket of {num_rows}"
        if missing == 0:
            return self
        ones = np.ones(missing, dtype=np.int32)
        dummies = np.zeros((missing, self.tables.shape[1]), dtype=np.int32)
        return HostRows(
            np.concatenate([self.q_lens, ones]),
            np.concatenate([self.kv_lens, ones]),
            np.concatenate([self.tables, dummies]),
        )

    def num_index_entries(self, heads: Heads) -> int:
        """int32 entries of the index: two lists of starts, last lengths, block ids."""
        return 3 * self.num_seqs + 2 + int(self._num_blocks(heads.block_size).sum())

    def write(self, entries: Tensor, block_size: int) -> tuple[SequenceIndex, Tensor]:
        """Fill int32 host `entries` with the index; returns views into it, and the kv_lens."""
        num_blocks = self._num_blocks(block_size)
        index = _views(entries, self.num_seqs, int(num_blocks.sum()))
        _write_starts(index.q_starts.numpy(), self.q_lens)
        _write_starts(index.block_starts.numpy(), num_blocks)
        index.last_block_lens.numpy()[:] = self.kv_lens - (num_blocks - 1) * block_size
        index.block_ids.numpy()[:] = self.block_ids(block_size)
        return index, torch.from_numpy(np.ascontiguousarray(self.kv_lens))

    def block_ids(self, block_size: int) -> np.ndarray:
        """int32: the blocks of each sequence's slots, one sequence after the other."""
        columns = np.arange(self.tables.shape[1], dtype=np.int32)
        is_used = columns < self._num_blocks(block_size)[:, None]  # [num_seqs, max_blocks]
        block_ids = self.tables[is_used]
        assert block_ids.min(initial=0) >= 0, "a block table is shorter than its kv_len"
        return block_ids

    def views(self, entries: Tensor, heads: Heads) -> SequenceIndex:
        """The index within the device copy of the entries."""
        num_blocks = int(self._num_blocks(heads.block_size).sum())
        return _views(entries, self.num_seqs, num_blocks)

    def _num_blocks(self, block_size: int) -> np.ndarray:
        return (self.kv_lens + block_size - 1) // block_size  # [num_seqs]


def _views(entries: Tensor, num_seqs: int, num_blocks: int) -> SequenceIndex:
    """Starts, starts and lengths come first, so their places depend on num_seqs alone."""
    sizes = (num_seqs + 1, num_seqs + 1, num_seqs, num_blocks)
    return SequenceIndex(*entries[: sum(sizes)].split(sizes))


def _write_starts(starts: np.ndarray, lens: np.ndarray) -> None:
    starts[0] = 0
    np.cumsum(lens, out=starts[1:])
