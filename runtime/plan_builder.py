"""Collects one step's decisions and seals them into a StepPlan.

Keeps beside the plan which request each entry belongs to, for when the result comes back.
Knows nothing of why anything was decided.
"""

import dataclasses

import msgspec

from zipage_lang.radix_cache.block_table import Append, CompactionBlocks
from zipage_lang.runtime.request import Request
from zipage_lang.runtime.step_plan import (
    BlockCopy,
    BlockSwap,
    BlockUpdate,
    Chunk,
    Compaction,
    RowSetup,
    StepPlan,
)


class PlannedChunk(msgspec.Struct, frozen=True, gc=False):
    request: Request
    chunk: Chunk
    sampling_requests: tuple[Request, ...]  # in the order of chunk.sample_rows


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedCompaction:
    request: Request
    blocks: CompactionBlocks
    compaction: Compaction

    @property
    def num_blocks_coming(self) -> int:
        """Blocks that are free (or only others') once it is done."""
        return len(self.blocks.block_ids_before) - len(self.blocks.block_ids)


class PlanBuilder:
    """One step in the making."""

    def __init__(self) -> None:
        self.chunks: list[PlannedChunk] = []
        self.compactions: list[PlannedCompaction] = []
        self.blocks_promised = 0  # coming blocks that a stalled request is waiting for
        self.has_displaced = False  # someone was preempted or swapped to make room
        # Leaders, and samples that wait with what their leader's chunk of this step computes.
        self.branches: list[tuple[Request, Request]] = []
        self._planned: set[int] = set()  # rows
        self._row_setups: dict[int, RowSetup] = {}  # by row
        self._updates: list[BlockUpdate] = []
        self._copies: list[BlockCopy] = []
        self._swap_outs: list[BlockSwap] = []
        self._swap_ins: list[BlockSwap] = []
        self._host_ids_read: list[int] = []
        self._coming_blocks: set[int] = set()  # what they hold is there from the next plan on
        self._coming_rows: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether it moves nobody forward so far."""
        return not self.chunks and not self.compactions and not self._swap_ins

    def is_planned(self, request: Request) -> bool:
        return request.row in self._planned

    def is_coming_back(self, request: Request) -> bool:
        """Whether blocks of its come back from host memory in this step, so that it does nothing
        else in it. A state that was all found in the tree need not wait."""
        return request.row in self._coming_rows

    def is_set_up(self, request: Request) -> bool:
        """Whether it took its row in this step: what its blocks hold may come only with it."""
        return request.row in self._row_setups

    def set_up_row(self, request: Request) -> None:
        assert request.row is not None
        assert request.table is not None
        # A row given up in this very step leaves nothing behind.
        if self._row_setups.pop(request.row, None) is not None:
            self._updates = [update for update in self._updates if update.row != request.row]
        self._row_setups[request.row] = RowSetup(
            row=request.row,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            seed=request.seed,
        )
        self._updates.append(BlockUpdate(request.row, 0, tuple(request.table.block_ids)))
        if not self._coming_blocks.isdisjoint(request.table.block_ids):
            self._coming_rows.add(request.row)
            self._planned.add(request.row)

    def append_blocks(self, request: Request, append: Append) -> None:
        assert request.row is not None
        if append.copy is not None:
            self._copies.append(BlockCopy(*append.copy))
        if append.block_ids:
            self._updates.append(BlockUpdate(request.row, append.first, append.block_ids))

    def is_copy(self, block_id: int) -> bool:
        """Whether the block gets its contents from another in this step."""
        return any(copy.dst == block_id for copy in self._copies)

    def add_decode(self, request: Request, chunk: Chunk) -> None:
        """As `add_chunk` of a request that draws for itself alone."""
        self.chunks.append(PlannedChunk(request, chunk, (request,)))
        self._planned.add(chunk.row)

    def add_chunk(self, planned: PlannedChunk) -> None:
        self.chunks.append(planned)
        self._planned.add(planned.chunk.row)
        self._planned.update(planned.chunk.sample_rows)

    def add_compaction(self, planned: PlannedCompaction) -> None:
        self.compactions.append(planned)
        self._planned.add(planned.compaction.row)

    def swap_out(self, block_ids: list[int], host_ids: tuple[int, ...]) -> None:
        pairs = zip(block_ids, host_ids, strict=True)
        self._swap_outs.extend(BlockSwap(block_id, host_id) for block_id, host_id in pairs)

    @property
    def host_ids_read(self) -> tuple[int, ...]:
        """Host blocks that come back in this step: free once it is sealed, not before, since a
        swap-out of the same step would overwrite them."""
        return tuple(self._host_ids_read)

    def swap_in(self, block_ids: list[int], host_ids: tuple[int, ...]) -> None:
        pairs = zip(block_ids, host_ids, strict=True)
        self._swap_ins.extend(BlockSwap(block_id, host_id) for block_id, host_id in pairs)
        self._host_ids_read += host_ids
        self._coming_blocks.update(block_ids)

    def _in_batch_order(self) -> list[PlannedChunk]:
        """Decodes first, those that share a prefix side by side: a card attends to neighbours at
        about the same time, so the shared blocks are read from memory once and then from its cache.
        """
        decodes = [planned for planned in self.chunks if planned.chunk.num_tokens == 1]
        decodes.sort(key=_block_ids)
        return decodes + [planned for planned in self.chunks if planned.chunk.num_tokens > 1]

    def seal(self, step: int) -> StepPlan:
        return StepPlan(
            step=step,
            row_setups=tuple(self._row_setups.values()),
            block_updates=tuple(self._updates),
            swap_outs=tuple(self._swap_outs),
            swap_ins=tuple(self._swap_ins),
            block_copies=tuple(self._copies),
            chunks=tuple(planned.chunk for planned in self._in_batch_order()),
            compactions=tuple(planned.compaction for planned in self.compactions),
        )


def _block_ids(planned: PlannedChunk) -> list[int]:
    table = planned.request.table
    assert table is not None, f"{planned.request.request_id} computes without blocks"
    return table.block_ids
