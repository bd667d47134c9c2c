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
        self._planned: set[int] = set()  # rows
        self._row_setups: list[RowSetup] = []
        self._updates: list[BlockUpdate] = []
        self._copies: list[BlockCopy] = []
        self._swap_outs: list[BlockSwap] = []
        self._swap_ins: list[BlockSwap] = []

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.compactions

    def is_planned(self, request: Request) -> bool:
        return request.row in self._planned

    def set_up_row(self, request: Request) -> None:
        assert request.row is not None
        assert request.table is not None
        # A row given up in this very step leaves nothing behind.
        self._row_setups = [setup for setup in self._row_setups if setup.row != request.row]
        self._updates = [update for update in self._updates if update.row != request.row]
        self._row_setups.append(
            RowSetup(
                row=request.row,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                seed=request.seed,
            )
        )
        self._updates.append(BlockUpdate(request.row, 0, tuple(request.table.block_ids)))

    def append_blocks(self, request: Request, append: Append) -> None:
        assert request.row is not None
        if append.copy is not None:
            self._copies.append(BlockCopy(*append.copy))
        if append.block_ids:
            self._updates.append(BlockUpdate(request.row, append.first, append.block_ids))

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
        return tuple(swap.host_id for swap in self._swap_ins)

    def swap_in(self, block_ids: list[int], host_ids: tuple[int, ...]) -> None:
        pairs = zip(block_ids, host_ids, strict=True)
        self._swap_ins.extend(BlockSwap(block_id, host_id) for block_id, host_id in pairs)

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
            row_setups=tuple(self._row_setups),
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
