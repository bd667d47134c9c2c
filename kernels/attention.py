"""Paged attention on the card through FlashInfer: eager steps, and decode inside CUDA graphs.

Knows nothing of requests, policies or how the blocks were filled.

A step's sequences run as two launches: the leading run of decodes (queries in tiles of 16 rows,
bound by how fast keys and values are read), then the rest (tiles of 64 or 128 rows, causal). In one
launch FlashInfer picks the tile from the mean query length, so that a single long chunk beside a
hundred decodes would make each decode compute on tiles of mostly padding.

Plan and run belong on the same stream, in turn: a plan's copies queue up behind the kernels of the
step before, so planning step t+1 while step t runs is safe. The host side of a plan alternates
between two pinned buffers, each guarded by an event of its last copy.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import (
    Heads,
    LaunchPlan,
    PagedAttentionModule,
    SequenceIndex,
)
from zipage_lang.kernels.plan_buffers import PlanBuffers

_MAX_TILE_ROWS = 128  # query rows of FlashInfer's largest tile
_DECODE_TILE_ROWS = 16
_CTAS_PER_SM = 2  # what FlashInfer's plan fills the card with


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPart:
    """One launch over consecutive tokens of the step."""

    num_tokens: int
    launch: LaunchPlan
    index: SequenceIndex  # on the device
    workspace: Tensor  # uint8, FlashInfer's index workspace


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The launches of one step, in the order of its tokens; valid until the next plan."""

    parts: tuple[AttentionPart, ...]


class FlashInferAttention:
    """Attention for one dtype; owns the workspaces, which all plans share."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: bfloat16 or float16, of queries and pool."""
        assert dtype in (torch.bfloat16, torch.float16), f"FlashInfer does not attend in {dtype}"
        self.device, self._dtype = device, dtype
        self._modules: dict[int, PagedAttentionModule] = {}  # head_dim -> module
        self._partials = torch.empty(0, dtype=torch.uint8, device=device)
        self._decode_buffers = PlanBuffers(device)
        self._rest_buffers = PlanBuffers(device)

    def plan_attention(
        self,
        batch: AttentionBatch,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> AttentionPlan:
        """Divide a step's work and send its indices to the card, without waiting for it.

        Args:
            batch: int32 host tensors; see AttentionBatch. Every sequence has kv_len >= q_len >= 1.
            num_q_heads, num_kv_heads, head_dim, block_size: the shape of queries and pool.
        """
        heads = Heads(num_q_heads, num_kv_heads, head_dim, block_size)
        rows = HostRows.of(batch)
        num_decodes = rows.num_leading_decodes
        parts = []
        if num_decodes > 0:
            decodes = rows.sliced(0, num_decodes)
            parts.append(self.plan_part(decodes, heads, self._decode_buffers))
        if num_decodes < rows.num_seqs:
            rest = rows.sliced(num_decodes, rows.num_seqs)
            parts.append(self.plan_part(rest, heads, self._rest_buffers))
        return AttentionPlan(tuple(parts))

    def attention(
        self, q: Tensor, layer_kv: Tensor, plan: AttentionPlan, scale: float, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of this step's queries over the resident slots of their sequences.

        Args:
            q: [num_tokens, num_q_heads, head_dim], after RoPE, unscaled.
            layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], this step's K and V
                included.
            plan: from `plan_attention`.
            scale: factor on q.k.
            need_lse: whether the log-sum-exp is wanted.

        Returns:
            out: [num_tokens, num_q_heads, head_dim], dtype of q.
            lse: float32 [num_tokens, num_q_heads], log2 of the sum of exp(scale * q.k), when asked.
        """
        module = self.module(q.shape[2])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if need_lse else None
        start = 0
        for part in plan.parts:
            tokens = slice(start, start + part.num_tokens)
            module.run(
                (self._partials, part.workspace),
                part.launch,
                q[tokens],
                layer_kv,
                part.index,
                out[tokens],
                None if lse is None else lse[tokens],
                scale,
            )
            start += part.num_tokens
        assert start == len(q), f"the plan is for {start} tokens, q has {len(q)}"
        return out, lse

    def plan_part(
        self, rows: "HostRows", heads: Heads, buffers: PlanBuffers, *, is_padded: bool = False
    ) -> AttentionPart:
        """Plan one launch over all the given rows, through the given buffers."""
        num_tokens = int(rows.q_lens.sum())
        self.reserve_partials(heads)
        num_tiles = _max_tiles(num_tokens, rows.num_seqs, heads, self.device)
        num_entries = rows.num_index_entries(heads)
        host = buffers.next_host(num_entries, num_tiles, num_tokens)
        index, kv_lens = rows.write(host.entries, heads.block_size)
        launch = self.module(heads.head_dim).plan(
            (self._partials, buffers.workspace, host.workspace),
            index,
            kv_lens,
            heads,
            is_causal=num_tokens > rows.num_seqs,
            is_padded=is_padded,
        )
        buffers.send(host, num_entries)
        return AttentionPart(
            num_tokens, launch, rows.views(buffers.entries, heads), buffers.workspace
        )

    def reserve_partials(self, heads: Heads) -> None:
        """Make room for the partial outputs of split sequences.

        FlashInfer splits only as far as two tiles per multiprocessor go, whatever their size. This
        also holds a padded decode launch: at most two tiles of 16 rows for each row it is used for.
        """
        num_ctas = _CTAS_PER_SM * _num_sms(self.device)
        per_head = -(-num_ctas // heads.num_kv_heads) + 1
        rows = heads.num_q_heads * per_head * _MAX_TILE_ROWS
        num_bytes = rows * (heads.head_dim + 1) * 4 + 4096
        if num_bytes > self._partials.numel():
            self._partials = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def module(self, head_dim: int) -> PagedAttentionModule:
        """The compiled kernels for a head size, loaded on first use."""
        if head_dim not in self._modules:
            self._modules[head_dim] = PagedAttentionModule(self._dtype, head_dim)
        return self._modules[head_dim]


class GraphDecode:
    """Decode attention whose launch can be captured: fixed addresses, fixed launch shape.

    `plan` is called before capture and before each replay; its result is the same object in effect
    (equal launch, same tensors), so what was captured stays valid. From `min_unsplit_rows` on
    FlashInfer never splits a sequence, so the plain launch has a fixed shape and no merge pass;
    below it the padded launch is used, which is as large as any batch of that many rows may need.
    All buckets share the buffers: one of them runs at a time, on one stream.
    """

    def __init__(
        self,
        attention: FlashInferAttention,
        heads: Heads,
        *,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        """max_rows: the largest bucket; max_blocks: blocks a row's table may hold."""
        self._attention, self._heads = attention, heads
        self._buffers = PlanBuffers(attention.device)
        attention.reserve_partials(heads)
        num_tiles = _max_tiles(max_rows, max_rows, heads, attention.device)
        num_entries = 3 * max_rows + 2 + max_rows * max_blocks
        self._buffers.next_host(num_entries, num_tiles, max_rows)
        self._max_entries = num_entries
        self._launches: dict[int, LaunchPlan] = {}  # bucket -> what was captured

    @property
    def min_unsplit_rows(self) -> int:
        """Rows from which on one tile per row and KV head already fills the card."""
        num_ctas = _CTAS_PER_SM * _num_sms(self._attention.device)
        return num_ctas // self._heads.num_kv_heads + 1

    def plan(self, batch: AttentionBatch, bucket: int) -> AttentionPlan:
        """Plan a step of at most `bucket` decodes; missing rows read one slot of dummy block 0.

        Args:
            batch: as for `plan_attention`, each row with one query token.
        """
        rows = HostRows.of(batch).padded(bucket)
        assert rows.num_leading_decodes == bucket, f"{rows.q_lens=} must be decodes"
        num_entries = rows.num_index_entries(self._heads)
        assert num_entries <= self._max_entries, f"{num_entries} entries of {self._max_entries}"
        is_padded = bucket < self.min_unsplit_rows
        part = self._attention.plan_part(rows, self._heads, self._buffers, is_padded=is_padded)
        captured = self._launches.setdefault(bucket, part.launch)
        assert part.launch == captured, f"bucket {bucket}: {part.launch} is not {captured}"
        return AttentionPlan((part,))


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
        columns = np.arange(self.tables.shape[1], dtype=np.int32)
        is_used = columns < num_blocks[:, None]  # [num_seqs, max_blocks]
        block_ids = index.block_ids.numpy()
        block_ids[:] = self.tables[is_used]
        assert block_ids.min(initial=0) >= 0, "a block table is shorter than its kv_len"
        return index, torch.from_numpy(np.ascontiguousarray(self.kv_lens))

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


def _max_tiles(num_tokens: int, num_seqs: int, heads: Heads, device: torch.device) -> int:
    """An upper bound on the tiles of a launch, over rows and over splits."""
    group = heads.num_q_heads // heads.num_kv_heads
    return num_tokens * group // _DECODE_TILE_ROWS + num_seqs + _CTAS_PER_SM * _num_sms(device)


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
