"""Runs jobs on an engine in this process: no sockets, no second event loop, no text on the way.

For large sweeps on a card. Importing it loads torch. Knows nothing of problems or files.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from zipage_lang.evaluation.runner import WAITING_PER_ROW, Job, Output
from zipage_lang.frontend.tokenizer import load_tokenizer
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.garbage import calm_garbage_collector
from zipage_lang.runtime.messages import Abort, Ready


class InProcessRunner:
    """A Runner that steps the engine itself, between two outputs that it hands out."""

    def __init__(self, model: str, **options: Any) -> None:
        """options: those of EngineConfig. Raises ValueError or RuntimeError with the fix."""
        config = EngineConfig.from_options(model=model, **options)
        self.max_running = config.scheduler.max_running
        self.num_tokens = 0
        self._engine = Engine(config)
        self.tokenizer = load_tokenizer(self._engine.ready.model_path)
        self._ids = itertools.count()
        calm_garbage_collector()

    @property
    def ready(self) -> Ready:
        return self._engine.ready

    def run(self, jobs: Iterable[Job]) -> Iterator[Output]:
        waiting = iter(jobs)
        open_outputs: dict[tuple[str, int], Output] = {}
        try:
            while self._top_up(waiting, open_outputs) or open_outputs:
                for item in self._engine.step():
                    self.num_tokens += len(item.token_ids)
                    output = open_outputs[item.request_id, item.sample_index]
                    output.feed(item)
                    if item.is_final:
                        del open_outputs[item.request_id, item.sample_index]
                        yield output
        except KeyboardInterrupt:
            raise  # it may have struck inside a step: this engine must not be stepped again
        except BaseException:  # the reader has left, or a request failed
            self._abandon({request_id for request_id, _ in open_outputs})
            raise

    def stats(self) -> dict[str, int | float | str]:
        return self._engine.stats()

    def flush_cache(self) -> None:
        self._engine.scheduler.flush_cache()

    def close(self) -> None:
        """The engine's memory goes with this object."""

    def _top_up(self, waiting: Iterator[Job], open_outputs: dict[tuple[str, int], Output]) -> bool:
        """Send jobs until enough samples are under way; whether any was sent."""
        has_sent = False
        wanted = (1 + WAITING_PER_ROW) * self.max_running
        while len(open_outputs) < wanted:
            job = next(waiting, None)
            if job is None:
                break
            request_id = str(next(self._ids))
            for index in range(job.sampling.n):
                open_outputs[request_id, index] = Output(job.key, index)
            self._engine.handle(job.request(request_id))
            has_sent = True
        return has_sent

    def _abandon(self, request_ids: set[str]) -> None:
        if not request_ids:
            return
        self._engine.handle(Abort(request_ids=sorted(request_ids)))
        while self._engine.has_work:
            self._engine.step()
        self._engine.step()
