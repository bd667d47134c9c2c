"""The real scheduler plays a load in seconds, without a model: how many steps, what they read.

    python benchmarks/schedule.py --load aime --budget 2048 --turn-len 512

Steps are planned one ahead, and compactions are told, as the engine does on a card. The last line
is one JSON object: counts of the scheduler, and the seconds in which a card would read the weights
and the resident KV of all steps. Knows nothing of tensors.
"""

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from limits import Machine
from loads import LOADS, Load

from zipage_lang.runtime.compactor import MAX_AWAITED
from zipage_lang.runtime.config import CacheConfig, CompressionConfig, SchedulerConfig
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.scheduler import Scheduler
from zipage_lang.runtime.step_plan import Sample, StepPlan, StepResult

BLOCK_SIZE = 16
WINDOW = 16  # queries that a ring keeps
STATE_BYTES = 36 * 8 * 8  # a slot's score and position, Qwen3-8B: layers, KV heads, bytes
COUNTS = ("compactions", "early_compactions", "preemptions", "swap_outs", "swap_ins", "turns_taken")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=sorted(LOADS), default="aime")
    parser.add_argument("--budget", type=int, help="K; without it all KV is kept")
    parser.add_argument("--interval", type=int, default=256)
    parser.add_argument("--policy", choices=["zipage", "zipage2"], default="zipage")
    parser.add_argument("--pool-gib", type=float, default=40.0)
    parser.add_argument("--swap-gib", type=float, default=26.0)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--max-step-tokens", type=int, default=4096)
    parser.add_argument("--num-query-slots", type=int, default=64)
    parser.add_argument("--turn-len", type=int, default=SchedulerConfig().turn_len)
    return parser.parse_args(words)


def make_scheduler(options: argparse.Namespace) -> Scheduler:
    block_bytes = (Machine(pool_tokens=0).kv_bytes_per_token + STATE_BYTES) * BLOCK_SIZE
    num_blocks = int(options.pool_gib * 2**30 // block_bytes)
    scheduler = SchedulerConfig(
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        turn_len=options.turn_len,
    )
    compression = CompressionConfig(
        kv_mode="off" if options.budget is None else "fixed",
        kv_budget=options.budget or CompressionConfig().kv_budget,
        evict_interval=options.interval,
        policy=options.policy,
    )
    limits = Limits(
        num_blocks=num_blocks,
        num_host_blocks=int(options.swap_gib * 2**30 // block_bytes),
        num_query_slots=options.num_query_slots,
        window=WINDOW,
        max_model_len=32_768,
        vocab_size=2**20,
        eos_token_ids=(),
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks)
    return Scheduler(scheduler, cache, compression, limits, {"zipage": WINDOW, "zipage2": 0})


def play(scheduler: Scheduler, load: Load, machine: Machine) -> dict[str, Any]:
    """All of the load, there from the start; what its steps read, and the scheduler's counts."""
    for index, (prompt, num_output) in enumerate(load):
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=index)
        scheduler.add(AddRequest(request_id=str(index), token_ids=prompt, sampling=sampling))
    in_flight: collections.deque[tuple[StepPlan, tuple[int, ...]]] = collections.deque()
    rows: collections.Counter[int] = collections.Counter()
    batches: collections.Counter[int] = collections.Counter()
    num_slots = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        if not plan.is_empty:
            in_flight.append((plan, _start_compactions(scheduler, plan)))
            rows[len(plan.chunks) // 16 * 16] += 1
            batches[len(plan.compactions)] += 1
            num_slots += sum(chunk.resident_start + chunk.num_tokens for chunk in plan.chunks)
        while len(in_flight) > 1 or (plan.is_empty and in_flight):
            _finish(scheduler, *in_flight.popleft())
    stats = scheduler.stats()
    num_steps = int(stats["num_steps"])
    num_bytes = num_steps * machine.weight_bytes + num_slots * machine.kv_bytes_per_token
    return {
        "num_steps": num_steps,
        "read_s": num_bytes / machine.bandwidth,
        "num_tokens": stats["num_decoded_tokens"],
        **{f"num_{name}": stats[f"num_{name}"] for name in COUNTS},
        "steps_by_rows": dict(sorted(rows.items())),
        "steps_by_compactions": dict(sorted(batches.items())),
    }


def _start_compactions(scheduler: Scheduler, plan: StepPlan) -> tuple[int, ...]:
    """Few count as done before the next step is planned; returns those that are told later."""
    idents = tuple(compaction.ident for compaction in plan.compactions)
    if len(idents) > MAX_AWAITED:
        return idents
    scheduler.note_compacted(idents)
    return ()


def _finish(scheduler: Scheduler, plan: StepPlan, compacted: tuple[int, ...]) -> None:
    rows = [row for chunk in plan.chunks for row in chunk.sample_rows]
    samples = tuple(Sample(row=row, token_id=0) for row in rows)
    result = StepResult(step=plan.step, samples=samples, done_compactions=compacted)
    scheduler.apply(plan, result)
    scheduler.take_outputs()


def main() -> None:
    options = parse_arguments()
    machine = Machine(pool_tokens=0)  # what it reads, and how fast; the pool is the scheduler's
    played = play(make_scheduler(options), LOADS[options.load](), machine)
    print(json.dumps({**vars(options), **played}))


if __name__ == "__main__":
    main()
