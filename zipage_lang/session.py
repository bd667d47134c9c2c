"""One run of a program: what all its states share, and the end of it.

Knows nothing of expressions, tokens or how a call is made.
"""

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from zipage_lang.backend import Backend, Scoring
from zipage_lang.budgets import Budget
from zipage_lang.chat import ChatTemplate
from zipage_lang.errors import RunCancelledError
from zipage_lang.held_states import find_held_states
from zipage_lang.loops import LoopBridge
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.trace import RunTrace, Trace


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run was started with. Calls take `sampling` and `kv` where they say nothing else."""

    backend: Backend
    template: ChatTemplate
    sampling: SamplingParams
    kv: KVParams
    root_seed: int
    trace: Trace | None = None
    budget: Budget | None = None


class Session:
    """The settings, the loop and the running work of one program run."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.bridge = LoopBridge(settings.backend.loop)
        self.group_id = f"run-{uuid.uuid4().hex}"
        self.cancelled_by: RunCancelledError | None = None
        self.trace: RunTrace | None = None
        self.held = find_held_states(settings.backend, self.group_id)
        self.scores_itself = isinstance(settings.backend, Scoring)
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(
        self, work: Coroutine[Any, Any, None], on_end: Callable[[], None] = lambda: None
    ) -> "asyncio.Task[None]":
        """Start `work` from the loop, on the loop; `on_end` is called there however it ends."""
        task = self.bridge.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: on_end())
        return task

    async def drain(self) -> None:
        """Wait, on the loop, until no work is left: branches that nobody joined too."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def end(self) -> None:
        """Wait until no work is left, then hold nothing more in the engine."""
        await self.drain()
        if self.held is not None:
            self.held.end()

    def cancel(self, cause: BaseException | None = None, reason: str | None = None) -> None:
        """Give the run up: what is pending raises RunCancelledError, its requests are aborted."""
        error = RunCancelledError(reason)
        error.__cause__ = cause
        if not self.bridge.loop.is_closed():  # a closed engine has dropped its requests itself
            self.bridge.call(lambda: self._cancel_on_loop(error))

    def _cancel_on_loop(self, error: RunCancelledError) -> None:
        if self.cancelled_by is not None:
            return
        self.cancelled_by = error
        if self.trace is not None:
            self.trace.cancel(error)
        for task in self._tasks:
            task.cancel()
        if self.held is not None:
            self.held.end()
        self.spawn(self.settings.backend.abort(self.group_id))


def merge_kv(*layers: KVParams | None) -> KVParams:
    """Field by field the last layer that says something."""
    merged: dict[str, Any] = {}
    for layer in layers:
        if layer is not None and not isinstance(layer, KVParams):
            raise ValueError(f"kv={layer!r} must be a zipage.KV(...)")
        for field in dataclasses.fields(layer) if layer is not None else ():
            value = getattr(layer, field.name)
            if value is not None:
                merged[field.name] = value
    return KVParams(**merged)
