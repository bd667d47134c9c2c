"""Decode steps as CUDA graphs: by batch bucket, the write of the query rings inside.

A step's numbers go into buffers of fixed place in one copy; block tables reach the card through the
attention's own plan. So compactions, forks and preemptions change numbers only, never a graph.
Knows nothing of sampling, requests or why a row decodes.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch, GraphPlanner
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.models.decoder import Decoder
from zipage_lang.runtime.out_of_memory import is_out_of_memory, release_memory
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.step_plan import Chunk

_LOG = logging.getLogger(__name__)

NUM_WARMUPS = 2  # runs before a capture, so that nothing allocates or compiles inside


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: fine where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_rows + 1, 16)]
    return (*(size for size in sizes if size < max_rows), max_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [bucket, vocab_size]


class _Kind(NamedTuple):
    """What a capture is for."""

    bucket: int
    has_queries: bool  # writes query rings
    is_second: bool  # of the attention launch that is faster for some steps only


class _Numbers(NamedTuple):
    """What the decodes of a step say, one array per field: int64 [num_chunks] each."""

    rows: np.ndarray
    positions: np.ndarray
    resident: np.ndarray  # slots before the token's own
    query_slots: np.ndarray  # -1: none

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "_Numbers":
        query_slots = [-1 if chunk.query_slot is None else chunk.query_slot for chunk in chunks]
        return cls(
            np.array([chunk.row for chunk in chunks], dtype=np.int64),
            np.array([chunk.position for chunk in chunks], dtype=np.int64),
            np.array([chunk.resident_start for chunk in chunks], dtype=np.int64),
            np.array(query_slots, dtype=np.int64),
        )


class DecodeGraphs:
    """Captures on first use or by `warm_up`; replays ever after."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        tables: RowTables,
        graph_decode: GraphPlanner,
        last_token_ids: Tensor,
        *,
        max_rows: int,
    ) -> None:
        """last_token_ids: int64 [all rows], what each row drew last; read inside the graphs."""
        self._model, self._cache, self._tables = model, cache, tables
        self._graph_decode, self._last_token_ids = graph_decode, last_token_ids
        self._buckets = buckets_up_to(max_rows)
        self._without_second: set[int] = set()  # buckets whose second capture found no memory
        self._captured: dict[_Kind, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        device = last_token_ids.device
        # rows, positions, slots, ring slots of each row of the batch
        self._inputs = torch.zeros((4, max_rows), dtype=torch.int64, device=device)
        self._token_index = torch.arange(max_rows, device=device)
        self._lines = np.arange(max_rows)

    def can_run(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the step is nothing but decodes, each drawing for itself."""
        if not 0 < len(chunks) <= max(self._buckets, default=0) or chunks[-1].num_tokens > 1:
            return False  # decodes come first, so the last chunk tells most steps apart
        for chunk in chunks:
            is_known = chunk.token_ids is not None or chunk.prompt_score is not None
            if is_known or chunk.num_tokens != 1 or len(chunk.sample_rows) != 1:
                return False
        return True

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits of the step, [num_chunks, vocab_size]; valid until the next run.

        Where a graph that is wanted for the first time finds no memory, the error is raised and the
        graph is never wanted again: called once more, the step runs in a larger one, or `can_run`
        says that it can't.
        """
        bucket = next(size for size in self._buckets if size >= len(chunks))
        numbers = _Numbers.of(chunks)
        has_queries = bool(numbers.query_slots.max() >= 0)
        tables = self._tables.of_rows(numbers.rows)
        self._send_inputs(numbers, tables, bucket)
        batch = _attention_batch(numbers.resident, tables)
        may_be_second = bucket not in self._without_second
        plan = self._graph_decode.plan(batch, bucket, may_be_second=may_be_second)
        kind = _Kind(bucket, has_queries, plan.is_second)
        captured = self._captured.get(kind)
        if captured is None:
            captured = self._captured[kind] = self._capture_late(kind, plan)
        captured.graph.replay()
        return captured.logits[: len(chunks)]

    def warm_up(self, has_queries: bool, report: Callable[[int, int], None]) -> None:
        """Capture every bucket. `report` is told how many are done, and of how many.

        A bucket that finds no memory is left out, with one warning for all of them: smaller batches
        then run in the next larger graph, larger ones without a graph. One that finds none for its
        second capture runs all its steps in the first.
        """
        buckets = self._buckets[::-1]  # large first: they share memory
        kinds = [_Kind(bucket, has_queries, False) for bucket in buckets]
        kinds += [_Kind(bucket, has_queries, True) for bucket in self.second_buckets[::-1]]
        missing = []
        for done, kind in enumerate(kinds):
            try:
                self._captured[kind] = self._capture_padding(kind)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                missing.append(kind)
            if missing and missing[-1] == kind:
                release_memory()  # not while the error holds on to what was allocated
            report(done + 1, len(kinds))
        self._leave_out(missing)

    @property
    def second_buckets(self) -> tuple[int, ...]:
        """Those that have a second capture, ascending."""
        return tuple(filter(self._graph_decode.has_second, self._buckets))

    def _leave_out(self, missing: Sequence[_Kind]) -> None:
        """Do without these captures from now on; a warning says what that costs."""
        without = {kind.bucket for kind in missing if not kind.is_second}
        without_second = {kind.bucket for kind in missing if kind.is_second} - without
        self._buckets = tuple(bucket for bucket in self._buckets if bucket not in without)
        self._without_second |= without_second
        if without:
            _warn_of_missing(without, self._buckets)
        if without_second:
            _warn_of_missing_second(without_second)

    def _capture_late(self, kind: _Kind, attention_plan: object) -> _Captured:
        """In the middle of serving; without memory, one that also writes query rings will do."""
        try:
            return self._capture(kind, attention_plan)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            instead = self._captured.get(kind._replace(has_queries=True))
            if instead is None:
                self._leave_out([kind])
                raise
        release_memory()
        return instead

    def _capture_padding(self, kind: _Kind) -> _Captured:
        nothing, tables = _Numbers.of(()), np.zeros((0, 1), dtype=np.int32)
        self._send_inputs(nothing, tables, kind.bucket)
        plan = self._graph_decode.plan_padding(kind.bucket, is_second=kind.is_second)
        return self._capture(kind, plan)

    def _send_inputs(self, numbers: _Numbers, tables: np.ndarray, bucket: int) -> None:
        """Padding: slot and ring slot -1 are dropped by the stores."""
        count, block_size, window = len(numbers.rows), self._cache.block_size, self._cache.window
        host = torch.empty((4, bucket), dtype=torch.int64, pin_memory=True)
        values = host.numpy()
        values[:2, count:], values[2:, count:] = 0, -1
        values[0, :count], values[1, :count] = numbers.rows, numbers.positions
        block_index, offset = np.divmod(numbers.resident, block_size)
        block_ids = tables[self._lines[:count], block_index]
        assert block_ids.min(initial=1) > 0, "a token's slot is not in its row's block table"
        np.multiply(block_ids, block_size, out=values[2, :count], dtype=np.int64)
        values[2, :count] += offset
        ring_slots = numbers.query_slots * window + numbers.positions % window
        values[3, :count] = np.where(numbers.query_slots < 0, -1, ring_slots)
        self._inputs[:, :bucket].copy_(host, non_blocking=True)

    def _capture(self, kind: _Kind, attention_plan: object) -> _Captured:
        rows, positions, slots, ring_slots = self._inputs[:, : kind.bucket].unbind()
        token_index = self._token_index[: kind.bucket]

        def forward() -> Tensor:
            batch = ForwardBatch(
                token_ids=self._last_token_ids.index_select(0, rows),
                positions=positions,
                slots=slots,
                attention_plan=attention_plan,
                ring_slots=ring_slots if kind.has_queries else None,
                wanted=None,
                logits_index=token_index,
            )
            return self._model.logits(self._model.forward(batch, self._cache))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARMUPS):
                forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        return _Captured(graph, logits)


def _warn_of_missing(missing: set[int], kept: tuple[int, ...]) -> None:
    _LOG.warning(
        "no memory for the decode graphs of batch sizes %s; %s. Lower gpu_memory_share, "
        "kv_cache_memory or max_running to have them all",
        sorted(missing),
        f"those up to {max(kept)} still run in graphs" if kept else "decoding runs without graphs",
    )


def _warn_of_missing_second(missing: set[int]) -> None:
    _LOG.warning(
        "no memory for the second decode graphs, faster for some steps, of batch sizes %s: "
        "the first serve all. Lower gpu_memory_share or kv_cache_memory to have them",
        sorted(missing),
    )


def _attention_batch(resident: np.ndarray, tables: np.ndarray) -> AttentionBatch:
    return AttentionBatch(
        q_starts=torch.arange(len(resident) + 1, dtype=torch.int32),
        kv_lens=torch.from_numpy(np.add(resident, 1, dtype=np.int32, casting="same_kind")),
        block_tables=torch.from_numpy(np.ascontiguousarray(tables)),
    )
