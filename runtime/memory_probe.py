"""Measures what an engine takes of a card's memory besides its pool: runs its worst steps once.

The steps run on a small pool that is thrown away afterwards.
Knows nothing of how many blocks the real pool gets, or of what is in the steps.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from zipage_lang.runtime.memory_sizing import MemoryNeeds, graph_bytes
from zipage_lang.runtime.model_runner import ModelRunner
from zipage_lang.runtime.out_of_memory import (
    explained_out_of_memory,
    memory_in_use,
    release_memory,
)
from zipage_lang.runtime.worst_case import (
    WorstCase,
    decodes,
    largest_compaction,
    largest_step,
    usual_steps,
)


class Meter(NamedTuple):
    """Reads a card's memory, in bytes."""

    device: torch.device
    total: int
    used: Callable[[], int]  # by whoever, allocators' caches included


def measure_needs(
    make_runner: Callable[[int], tuple[ModelRunner, int]],
    worst: WorstCase,
    meter: Meter,
    *,
    used_before: int,
    logits_row_bytes: int,
) -> MemoryNeeds:
    """Run the worst steps and see what they took. The weights must be loaded.

    Args:
        make_runner: usable blocks -> a runner on a pool of that many, with no graphs captured yet,
            and the bytes of its pool.
        used_before: the meter's reading before the weights were loaded.
        logits_row_bytes: of one row's logits.

    Raises ValueError when the steps do not even fit beside the small pool.
    """
    what = f"a step of {worst.max_step_tokens} tokens and {worst.num_rows} requests"
    with explained_out_of_memory(what, meter.device):
        release_memory()
        readings = [meter.used()]
        runner, pool_bytes = make_runner(worst.num_blocks)
        readings.append(meter.used())
        readings += [meter.used() for _ in _run_worst_steps(runner, worst)]
    loaded, built, stepped, compacted, captured, captured_two = readings
    second_buckets = runner.second_buckets
    del runner
    release_memory()
    return MemoryNeeds(
        total=meter.total,
        others=used_before,
        weights=max(0, loaded - used_before),
        fixed=max(0, built - loaded - pool_bytes),
        step=max(0, stepped - built),
        compaction=max(0, compacted - stepped),
        graphs=graph_bytes(
            max(0, captured - compacted),
            max(0, captured_two - captured),
            worst.buckets,
            logits_row_bytes,
            second_buckets,
        ),
    )


def card_meter(device: torch.device) -> Meter:
    """Reads the card that `device` names."""
    return Meter(device, torch.cuda.mem_get_info(device)[1], lambda: memory_in_use(device))


def _run_worst_steps(runner: ModelRunner, worst: WorstCase) -> Iterator[None]:
    """Yields after the steps, the compactions, and the captures of the two largest buckets."""
    runner.run(largest_step(worst))
    for plan in usual_steps(worst):
        runner.run(plan)
    yield
    for policy in worst.compacted_by:
        runner.run(largest_compaction(worst, policy))
        runner.wait_for_compactions()
    yield
    largest = worst.buckets[-1:] or (worst.num_rows,)
    for bucket in (*largest, *(worst.buckets[-2:-1] or largest)):
        runner.run(decodes(worst, min(bucket, worst.num_rows)))
        yield
