"""A load for measuring throughput, and our engine running it: repeatable, greedy, of fixed length.

Knows nothing of command lines or of whom the engine is compared with.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from typing import Any

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.llm import Engine
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams

SEED = 7
COUNTS = (
    "num_steps",
    "num_compactions",
    "num_dropped_slots",
    "num_preemptions",
    "num_swap_outs",
    "num_tokens_hit",
    "num_tokens_asked",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One load: all prompts at once, `max_tokens` greedy tokens each, no end-of-sequence."""

    max_tokens: int
    prompts: list[list[int]]
    kv: KVParams

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        return self.batch * self.max_tokens


def make_job(batch: int, max_tokens: int, kv: KVParams, *, prompt_len: int, vocab_size: int) -> Job:
    """Prompts of random tokens, the same each time; none shares a prefix with another."""
    rng = random.Random(SEED)
    low, high = min(100, vocab_size // 2), min(40_000, vocab_size)
    prompts = [[rng.randrange(low, high) for _ in range(prompt_len)] for _ in range(batch)]
    return Job(max_tokens, prompts, kv)


def run_job(engine: Engine, job: Job) -> dict[str, Any]:
    """Run the load on an empty cache: seconds, latencies, and what the engine counted meanwhile."""
    engine.flush_cache()
    before = engine.stats()
    started = time.perf_counter()
    arrivals = engine.submit(_stream_all(engine.async_llm, job)).result()
    wall_s = time.perf_counter() - started
    after = engine.stats()
    counts = {name: _number(after[name]) - _number(before[name]) for name in COUNTS}
    compacts = job.kv.mode not in (None, "off")
    return {
        "mode": job.kv.mode,
        "K": job.kv.budget if compacts else None,
        "E": job.kv.interval if compacts else None,
        "wall_s": wall_s,
        **latencies(started, arrivals),
        **counts,
        "mean_step_ms": 1e3 * wall_s / counts["num_steps"],
        "peak_held_blocks": after["peak_held"],
    }


def latencies(started: float, arrivals: list[list[float]]) -> dict[str, float]:
    """Time to first token and time per output token over all requests."""
    first = [times[0] - started for times in arrivals]
    gaps = sorted(
        later - sooner for times in arrivals for sooner, later in itertools.pairwise(times)
    ) or [0.0]
    return {
        "ttft_ms_median": 1e3 * statistics.median(first),
        "tpot_ms_median": 1e3 * statistics.median(gaps),
        "tpot_ms_p99": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
    }


async def _stream_all(llm: AsyncLLM, job: Job) -> list[list[float]]:
    return await asyncio.gather(*(_stream(llm, prompt, job) for prompt in job.prompts))


async def _stream(llm: AsyncLLM, prompt: list[int], job: Job) -> list[float]:
    """When each token of one request came."""
    sampling = SamplingParams(
        temperature=0, max_tokens=job.max_tokens, ignore_eos=True, skip_special_tokens=False
    )
    times: list[float] = []
    async with contextlib.aclosing(llm.generate(prompt, sampling, kv=job.kv)) as outputs:
        async for output in outputs:
            times += [time.perf_counter()] * (len(output.token_ids) - len(times))
    return times


def _number(value: int | float | str) -> float:
    assert not isinstance(value, str), f"a counter is {value!r}"
    return value
