"""Executes a StepPlan, returns a StepResult. Short, since the others do the work.

Knows nothing of requests, queues or the tree.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.batch_builder import BatchBuilder
from zipage_lang.runtime.compactor import Compactor
from zipage_lang.runtime.decode_graphs import DecodeGraphs
from zipage_lang.runtime.device_clock import DeviceClock, Span, timed_event
from zipage_lang.runtime.device_copy import send_ints
from zipage_lang.runtime.draws import Draws
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.host_swap import Swap
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.sampler import Sampler
from zipage_lang.runtime.step_plan import (
    BlockCopy,
    BlockUpdate,
    Chunk,
    PromptLogprobs,
    PromptScore,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

LOGPROB_LINES = 64  # prompt positions whose logits are made at a time; bounds their memory


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    step: int
    draws: Draws | None
    prompt_logprobs: tuple[PromptLogprobs, ...]
    span: Span | None  # on the device; None on the CPU


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
    ) -> None:
        """graphs: None where decode steps run like any other."""
        self._model, self._cache, self._backend = loaded.model, cache, backend
        self._compactor, self._sampler = compactor, sampler
        self._tables, self._host_swap = tables, host_swap
        self._graphs = graphs
        self.clock = DeviceClock()
        self._batches = BatchBuilder(cache, backend, tables)

    def take_host_memory(self) -> None:
        """Take the host memory for swaps now, where taking it later would stall the device."""
        self._host_swap.take_memory()

    @torch.inference_mode()
    def capture_graphs(self, has_queries: bool, report: Callable[[int, int], None]) -> None:
        """Capture the decode graphs now, where there are any, rather than at first use."""
        if self._graphs is not None:
            self._graphs.warm_up(has_queries, report)

    @property
    def grouped_buckets(self) -> tuple[int, ...]:
        """Batch sizes that have a second decode graph, for steps whose rows share prefixes."""
        return () if self._graphs is None else self._graphs.grouped_buckets

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start all that the plan says, behind what was launched before; may not wait for it."""
        start = timed_event() if self._backend.device.type == "cuda" else None
        self._host_swap.swap_out(plan.swap_outs)
        self._copy_blocks(plan.block_copies)
        self._host_swap.swap_in(plan.swap_ins)
        for setup in plan.row_setups:
            self._sampler.set_up_row(setup)
        for update in plan.block_updates:
            self._tables.update(update)
        self._compact(plan)
        draws, prompt_logprobs = self._run_chunks(plan.chunks)
        span = None if start is None else (start, timed_event())
        return Launched(plan.step, draws, prompt_logprobs, span)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for the step's drawn tokens; a row that could draw none has an error instead."""
        samples = () if launched.draws is None else launched.draws.samples()
        if launched.span is not None:
            launched.span[1].synchronize()
            self.clock.add(launched.span)
        return StepResult(
            step=launched.step,
            samples=samples,
            prompt_logprobs=launched.prompt_logprobs,
            done_compactions=self._compactor.take_done(),
        )

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
        """Launch and wait."""
        return self.collect(self.launch(plan))

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        device = self._backend.device
        src = send_ints([copy.src for copy in copies], device)  # [num_copies]
        dst = send_ints([copy.dst for copy in copies], device)  # [num_copies]
        self._backend.copy_blocks(self._cache.block_pools, src, dst)

    def _run_chunks(
        self, chunks: Sequence[Chunk]
    ) -> tuple[Draws | None, tuple[PromptLogprobs, ...]]:
        if not chunks:
            return None, ()
        if self._graphs is not None and self._graphs.can_run(chunks):
            logits = self._graphs.run(chunks)  # [num_chunks, vocab_size]
            return self._draw(logits, [chunk.row for chunk in chunks]), ()
        batch = self._batches.build(chunks, self._sampler.last_token_ids)
        hidden = self._model.forward(batch, self._cache)  # [num_tokens, hidden_size]
        return self._sample(chunks, batch, hidden), self._prompt_logprobs(chunks, hidden)

    def _sample(self, chunks: Sequence[Chunk], batch: ForwardBatch, hidden: Tensor) -> Draws | None:
        drawing = [chunk for chunk in chunks if chunk.sample_rows]
        if not drawing:
            return None
        logits = self._model.logits(hidden[batch.logits_index])  # [num_drawing, vocab_size]
        rows = [row for chunk in drawing for row in chunk.sample_rows]
        if len(rows) > len(drawing):  # samples of one request draw from the same logits
            lines = [i for i, chunk in enumerate(drawing) for _ in chunk.sample_rows]
            logits = logits[send_ints(lines, logits.device)]  # [num_rows, vocab_size]
        return self._draw(logits, rows)

    def _draw(self, logits: Tensor, rows: Sequence[int]) -> Draws:
        draws = self._sampler.draw(logits, rows)
        draws.start_copy()
        return draws

    def _prompt_logprobs(
        self, chunks: Sequence[Chunk], hidden: Tensor
    ) -> tuple[PromptLogprobs, ...]:
        found, start = [], 0
        for chunk in chunks:
            if chunk.prompt_score is not None:
                first = start + chunk.prompt_score.first
                states = hidden[first : first + len(chunk.prompt_score.next_token_ids)]
                found.append(PromptLogprobs(chunk.row, self._score(chunk.prompt_score, states)))
            start += chunk.num_tokens
        return tuple(found)

    def _score(self, wanted: PromptScore, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """hidden: [num_wanted, hidden_size], the states that the wanted tokens follow."""
        next_ids = send_ints(wanted.next_token_ids, hidden.device)  # [num_wanted]
        entries: list[TokenLogprobs] = []
        parts = zip(hidden.split(LOGPROB_LINES), next_ids.split(LOGPROB_LINES), strict=True)
        for states, token_ids in parts:
            logits = self._model.logits(states)  # [num_lines, vocab_size]
            entries += self._sampler.score_prompt(logits, token_ids, wanted.num_top)
        return tuple(entries)

    def _compact(self, plan: StepPlan) -> None:
        if not plan.compactions:
            return
        self._compactor.launch(plan.compactions)
        for item in plan.compactions:
            self._tables.update(BlockUpdate(item.row, 0, item.block_ids))
