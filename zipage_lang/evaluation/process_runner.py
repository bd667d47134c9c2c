"""Runs jobs on an engine process, through the frontend's client; text is made at the end only.

Knows nothing of problems or files.
"""

import asyncio
import queue
from collections.abc import Iterable, Iterator
from typing import Any

from zipage_lang.evaluation.runner import WAITING_PER_ROW, Job, Output
from zipage_lang.frontend.async_llm import new_request_id
from zipage_lang.frontend.llm import Engine
from zipage_lang.frontend.token_stream import TokenStream
from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.messages import Ready

Results = queue.SimpleQueue["Output | None"]


class ProcessRunner:
    """A Runner over `zipage.Engine`."""

    def __init__(self, engine: Engine, max_running: int | None = None) -> None:
        """max_running: the engine's; None is its default. The engine is closed with the runner."""
        self._engine = engine
        self.tokenizer = engine.async_llm.tokenizer
        self.max_running = max_running or SchedulerConfig().max_running
        self.num_tokens = 0

    @classmethod
    def start(cls, model: str, **options: Any) -> "ProcessRunner":
        """options: those of EngineConfig. Raises ValueError or EngineStartError."""
        return cls(Engine(model, **options), options.get("max_running"))

    @property
    def ready(self) -> Ready:
        return self._engine.ready

    def run(self, jobs: Iterable[Job]) -> Iterator[Output]:
        results: Results = queue.SimpleQueue()
        pump = self._engine.submit(self._pump(iter(jobs), results))
        try:
            while (output := results.get()) is not None:
                yield output
            pump.result()
        finally:
            pump.cancel()

    def stats(self) -> dict[str, int | float | str]:
        return self._engine.stats()

    def flush_cache(self) -> None:
        self._engine.flush_cache()

    def close(self) -> None:
        self._engine.close()

    async def _pump(self, jobs: Iterator[Job], results: Results) -> None:
        """Keep enough samples under way; None ends the results, after an error too."""
        wanted = (1 + WAITING_PER_ROW) * self.max_running
        under_way = _UnderWay()
        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    await under_way.wait_below(wanted)
                    under_way.num_samples += job.sampling.n
                    stream = self._engine.async_llm.client.add(job.request(new_request_id()))
                    group.create_task(self._complete(job, stream, results, under_way))
        except* Exception as errors:
            raise errors.exceptions[0] from None
        finally:
            results.put(None)

    async def _complete(
        self, job: Job, stream: TokenStream, results: Results, under_way: "_UnderWay"
    ) -> None:
        outputs = [Output(job.key, index) for index in range(job.sampling.n)]
        try:
            async for item in stream:
                self.num_tokens += len(item.token_ids)
                output = outputs[item.sample_index]
                output.feed(item)
                if item.is_final:
                    under_way.finish_one()
                    results.put(output)
        finally:
            stream.close()


class _UnderWay:
    """How many samples were sent and have not ended."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._has_changed = asyncio.Event()

    async def wait_below(self, limit: int) -> None:
        while self.num_samples >= limit:
            self._has_changed.clear()
            await self._has_changed.wait()

    def finish_one(self) -> None:
        self.num_samples -= 1
        self._has_changed.set()
