"""Executes a StepPlan, returns a StepResult. Short, since the others do the work.

Knows nothing of requests, queues or the tree.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.chunk_runner import ChunkResults, ChunkRunner
from zipage_lang.runtime.compactor import Compactor
from zipage_lang.runtime.decode_graphs import DecodeGraphs
from zipage_lang.runtime.device_clock import DeviceClock, Span, timed_event
from zipage_lang.runtime.device_copy import send_ints
from zipage_lang.runtime.host_swap import Swap
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.out_of_memory import Retries, halved, no_memory_left
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.sampler import Sampler
from zipage_lang.runtime.step_plan import (
    BlockCopy,
    BlockSwap,
    BlockUpdate,
    RowSetup,
    StepPlan,
    StepResult,
    StepTrouble,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    step: int
    chunks: ChunkResults
    span: Span | None  # on the device; None on the CPU
    trouble: StepTrouble | None  # None: there was memory for all of it


@dataclasses.dataclass(slots=True)
class _Losses:
    """What a step being launched found no memory for."""

    rows: set[int] = dataclasses.field(default_factory=set)
    block_ids: set[int] = dataclasses.field(default_factory=set)  # not filled as the plan says
    host_ids: set[int] = dataclasses.field(default_factory=set)

    def note_rows_of(self, updates: Sequence[BlockUpdate]) -> None:
        """Rows that were given lost blocks in this step are lost with them."""
        if self.block_ids:
            lost = (update for update in updates if not self.block_ids.isdisjoint(update.block_ids))
            self.rows.update(update.row for update in lost)


class ModelRunner:
    """Owns no policy: the order of a step is the order that `step_plan` documents."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        backend: Backend,
        *,
        compactor: Compactor,
        sampler: Sampler,
        tables: RowTables,
        host_swap: Swap,
        graphs: DecodeGraphs | None,
        retries: Retries,
    ) -> None:
        """graphs: None where decode steps run like any other.
        retries: shared with the compactor and the sampler."""
        self._cache, self._backend = cache, backend
        self._compactor, self._sampler = compactor, sampler
        self._tables, self._host_swap = tables, host_swap
        self._graphs, self._retries = graphs, retries
        self.clock = DeviceClock()
        self._chunks = ChunkRunner(
            loaded.model,
            cache,
            backend,
            tables=tables,
            sampler=sampler,
            graphs=graphs,
            retries=retries,
        )

    def take_host_memory(self) -> int:
        """Take the host memory for swaps now, where taking it later would stall the device.

        Returns how many blocks it holds: fewer than asked for where the host gives no more.
        """
        return self._host_swap.take_memory()

    @torch.inference_mode()
    def capture_graphs(self, has_queries: bool, report: Callable[[int, int], None]) -> None:
        """Capture the decode graphs now, where there are any, rather than at first use."""
        if self._graphs is not None:
            self._graphs.warm_up(has_queries, report)

    @property
    def second_buckets(self) -> tuple[int, ...]:
        """Batch sizes that have a second decode graph, faster for some steps."""
        return () if self._graphs is None else self._graphs.second_buckets

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start all that the plan says, behind what was launched before; may not wait for it.

        Where memory is refused it does the work in smaller parts, and says what it could not do.
        """
        start = timed_event() if self._backend.device.type == "cuda" else None
        num_refusals, losses = self._retries.num_refusals, _Losses()
        self._move_blocks(plan, losses)
        self._set_up_rows(plan.row_setups, losses)
        for update in plan.block_updates:
            self._tables.update(update)
        losses.note_rows_of(plan.block_updates)
        self._compact(plan, losses)
        chunks = self._chunks.run(plan.chunks, losses.rows) if plan.chunks else ChunkResults()
        self._bring_back(plan, losses)
        num_refusals = self._retries.num_refusals - num_refusals
        trouble = self._trouble(plan, num_refusals, losses) if num_refusals else None
        span = None if start is None else (start, timed_event())
        return Launched(plan.step, chunks, span, trouble)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for the step's drawn tokens; a row that could draw none has an error instead."""
        samples = tuple(item for draws in launched.chunks.draws for item in draws.samples())
        if launched.span is not None:
            launched.span[1].synchronize()
            self.clock.add(launched.span)
        return StepResult(
            step=launched.step,
            samples=samples,
            prompt_logprobs=launched.chunks.prompt_logprobs,
            done_compactions=self._compactor.take_done(),
        )

    def go_on_behind_compactions(self) -> tuple[int, ...]:
        """Compactions that count as done from now on: the next step waits for them on the device.

        Few run beside the step they were launched with, and end before it does; so their requests
        miss no step but that one.
        """
        return self._compactor.go_on_behind()

    def wait_for_compactions(self) -> tuple[int, ...]:
        """Wait until all that were launched are done; those that `collect` has not told yet."""
        return self._compactor.wait()

    def note_idle(self) -> None:
        """There is no work: the time until the next step is not the engine's."""
        self.clock.forget_last()

    def device_times(self) -> dict[str, float]:
        """Seconds the device spent on steps, idle between them, and on compactions beside them."""
        return {
            "device_busy_s": self.clock.busy_s,
            "device_idle_s": self.clock.idle_s,
            "compaction_s": self._compactor.clock.busy_s,
        }

    def run(self, plan: StepPlan) -> StepResult:
        """Launch and wait. Raises MemoryError where a row's work found no memory."""
        launched = self.launch(plan)
        trouble = launched.trouble
        if trouble is not None and (trouble.failed_rows or trouble.lost_host_ids):
            raise MemoryError(trouble.error)
        return self.collect(launched)

    def _trouble(self, plan: StepPlan, num_refusals: int, losses: _Losses) -> StepTrouble:
        return StepTrouble(
            step=plan.step,
            num_refusals=num_refusals,
            failed_rows=tuple(sorted(losses.rows)),
            lost_host_ids=tuple(sorted(losses.host_ids)),
            error=no_memory_left(self._backend.device),
        )

    def _move_blocks(self, plan: StepPlan, losses: _Losses) -> None:
        """Halves of copies keep the rule that all sources are read before any target is written:
        the plan names copies in the order of its decisions, so what one writes none behind it
        reads."""

        def lose_host(swaps: Sequence[BlockSwap]) -> None:
            losses.host_ids.update(swap.host_id for swap in swaps)

        def lose_copies(copies: Sequence[BlockCopy]) -> None:
            losses.block_ids.update(copy.dst for copy in copies)

        if plan.swap_outs:
            self._retries.run(plan.swap_outs, self._host_swap.swap_out, halved, lose_host)
        if plan.block_copies:
            self._retries.run(plan.block_copies, self._copy_blocks, halved, lose_copies)

    def _bring_back(self, plan: StepPlan, losses: _Losses) -> None:
        """Behind the step's own work, so that the copies' way over the bus is beside it."""
        if not plan.swap_ins:
            return

        def lose_blocks(swaps: Sequence[BlockSwap]) -> None:
            losses.block_ids.update(swap.block_id for swap in swaps)

        # What did not get there does not come back.
        there = tuple(swap for swap in plan.swap_ins if swap.host_id not in losses.host_ids)
        lose_blocks([swap for swap in plan.swap_ins if swap.host_id in losses.host_ids])
        if there:
            self._retries.run(there, self._host_swap.swap_in, halved, lose_blocks)
        losses.note_rows_of(plan.block_updates)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        device = self._backend.device
        src = send_ints([copy.src for copy in copies], device)  # [num_copies]
        dst = send_ints([copy.dst for copy in copies], device)  # [num_copies]
        self._backend.copy_blocks(self._cache.block_pools, src, dst)

    def _set_up_rows(self, setups: Sequence[RowSetup], losses: _Losses) -> None:
        def set_up(setups: Sequence[RowSetup]) -> None:
            for setup in setups:
                self._sampler.set_up_row(setup)

        def lose(setups: Sequence[RowSetup]) -> None:
            losses.rows.update(setup.row for setup in setups)

        if setups:
            self._retries.run(setups, set_up, halved, lose)

    def _compact(self, plan: StepPlan, losses: _Losses) -> None:
        if not plan.compactions:
            return
        losses.rows.update(self._compactor.launch(plan.compactions))
        for item in plan.compactions:
            self._tables.update(BlockUpdate(item.row, 0, item.block_ids))
