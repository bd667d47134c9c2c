"""The steps that an engine runs once at its start: the worst its options allow, and usual ones.

The worst show what memory steps take; all of them have their kernels compiled and loaded by then,
so that no request waits for that later. All requests of them share the same few blocks: what they
compute means nothing. Knows nothing of how they are run or measured.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from zipage_lang.runtime.calibrations import needs_calibration
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.decode_graphs import buckets_up_to
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.policies.full import Full
from zipage_lang.runtime.policies.policy import Policy
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import (
    BlockCopy,
    BlockUpdate,
    Chunk,
    Compaction,
    RowSetup,
    StepPlan,
)

# Every feature that makes tensors as large as the logits.
COSTLY_SAMPLING = SamplingParams(
    max_tokens=2, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1
)


# What most requests ask for. Their draws take little, but have kernels of their own.
USUAL_SAMPLING = (
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=2, top_p=0.9),
    SamplingParams(max_tokens=2, logprobs=0),
    SamplingParams(max_tokens=2, presence_penalty=0.5),
)
USUAL_COPIES = (1, 17)  # blocks copied for few branches at once, and for many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """The bounds of a step, as options and policies set them."""

    max_running: int
    max_step_tokens: int
    max_model_len: int
    block_size: int
    num_query_slots: int
    has_queries: bool  # decodes write query rings
    buckets: tuple[int, ...]  # batch sizes of decode graphs, ascending; none: there are no graphs
    tail_len: int  # slots of the longest usual tail, K + E
    num_keep: int  # of them
    num_queries: int  # that the costliest policy scores with
    compacted_by: tuple[str, ...]  # policies to run once: the costliest, and the usual one

    @property
    def num_rows(self) -> int:
        """Requests of the largest step."""
        return min(self.max_running, self.max_step_tokens)

    @property
    def chunk_len(self) -> int:
        """Tokens of each of them; at most `num_rows` - 1 too few in all."""
        return min(self.max_step_tokens // self.num_rows, self.max_model_len - 1)

    @property
    def prompt_len(self) -> int:
        """Of a prompt that the small pool holds and one step computes."""
        held = min(self.num_blocks * self.block_size, self.max_model_len - 1)
        return min(self.max_step_tokens, held)

    @property
    def num_blocks(self) -> int:
        """Blocks of the small pool, without the dummy."""
        return -(-max(self.chunk_len + 1, self.tail_len) // self.block_size)

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(range(1, self.num_blocks + 1))

    def query_slot(self, row: int) -> int | None:
        return row if row < self.num_query_slots else None


def worst_case(config: EngineConfig, limits: Limits, policies: Mapping[str, Policy]) -> WorstCase:
    """What these options allow. The costliest policy is the one with the most queries, of those
    that need no calibration: only the usual one, which requests get that name none, has its own.

    That is another as a rule, with kernels of its own.
    """
    compression, scheduler = config.compression, config.scheduler
    ready = [policy for policy in policies.values() if not needs_calibration(policy)]
    costliest = max(ready, key=lambda policy: policy.num_queries)
    usual = compression.policy if compression.kv_mode != "off" else Full.name
    compacted_by = dict.fromkeys([costliest.name, usual])
    compacted_by.pop(Full.name, None)  # it never compacts
    tail_len = compression.kv_budget + compression.evict_interval
    return WorstCase(
        max_running=scheduler.max_running,
        max_step_tokens=scheduler.max_step_tokens,
        max_model_len=limits.max_model_len,
        block_size=config.cache.block_size,
        num_query_slots=limits.num_query_slots,
        has_queries=compression.kv_mode != "off",
        buckets=buckets_up_to(scheduler.max_running) if scheduler.cuda_graphs else (),
        tail_len=min(tail_len, limits.max_model_len),
        num_keep=min(compression.kv_budget, limits.max_model_len),
        num_queries=costliest.num_queries,
        compacted_by=tuple(compacted_by),
    )


def largest_step(worst: WorstCase) -> StepPlan:
    """All rows are set up, compute as many tokens as a step may, and draw one each."""
    rows = range(worst.num_rows)
    return StepPlan(
        step=0,
        row_setups=tuple(RowSetup(row, (0,), 1, COSTLY_SAMPLING, seed=row) for row in rows),
        block_updates=tuple(BlockUpdate(row, 0, worst.block_ids) for row in rows),
        chunks=tuple(
            Chunk(
                row=row,
                num_tokens=worst.chunk_len,
                token_ids=(0,) * worst.chunk_len,
                position=0,
                resident_start=0,
                sample_rows=(row,),
                query_slot=worst.query_slot(row),
                prompt_score=None,
            )
            for row in rows
        ),
    )


def usual_steps(worst: WorstCase) -> Iterator[StepPlan]:
    """For their kernels: a long prompt alone, draws by a row that keeps no query, and copies of
    blocks."""
    # Attention may have another kernel for a long prompt alone than for many short ones.
    yield _usual_draw(worst, USUAL_SAMPLING[0], worst.prompt_len)
    for sampling in USUAL_SAMPLING:
        yield _usual_draw(worst, sampling)
    for count in USUAL_COPIES:
        copies = tuple(BlockCopy(src=1, dst=block_id) for block_id in worst.block_ids[:count])
        yield StepPlan(step=1, block_copies=copies)


def _usual_draw(worst: WorstCase, sampling: SamplingParams, num_tokens: int = 1) -> StepPlan:
    """Behind a chunk of so many tokens, alone in its step."""
    return StepPlan(
        step=1,
        row_setups=(RowSetup(0, (0,), 1, sampling, seed=0),),
        block_updates=(BlockUpdate(0, 0, worst.block_ids),),
        chunks=(
            Chunk(
                row=0,
                num_tokens=num_tokens,
                token_ids=(0,) * num_tokens,
                position=0,
                resident_start=0,
                sample_rows=(0,),
                query_slot=None,
                prompt_score=None,
            ),
        ),
    )


def decodes(worst: WorstCase, num_rows: int) -> StepPlan:
    """So many rows decode; the steps before set them up."""
    return StepPlan(
        step=2,
        block_updates=tuple(BlockUpdate(row, 0, worst.block_ids) for row in range(num_rows)),
        chunks=tuple(
            Chunk(
                row=row,
                num_tokens=1,
                token_ids=None,
                position=worst.chunk_len,
                resident_start=worst.chunk_len,
                sample_rows=(row,),
                query_slot=worst.query_slot(row) if worst.has_queries else None,
                prompt_score=None,
            )
            for row in range(num_rows)
        ),
    )


def largest_compaction(worst: WorstCase, policy: str) -> StepPlan:
    """As many tails at once as there may be requests; the compressor cuts them into passes."""
    kept_blocks = worst.block_ids[: -(-worst.num_keep // worst.block_size)]
    num_blocks = -(-worst.tail_len // worst.block_size)
    return StepPlan(
        step=3,
        compactions=tuple(
            Compaction(
                ident=row,
                row=row,
                policy=policy,
                protected_len=0,
                tail_len=worst.tail_len,
                num_keep=worst.num_keep,
                stateful_len=0,
                logical_len=worst.tail_len,
                query_slot=row % worst.num_query_slots,
                num_queries=worst.num_queries,
                seed=row,
                block_ids_before=worst.block_ids[:num_blocks],
                block_ids=kept_blocks,
                block_copies=(),
            )
            for row in range(worst.num_rows)
        ),
    )
