"""One run of a program: what all its states share, and the end of it.

Knows nothing of expressions, tokens or how a call is made.
"""

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from zipage_lang.backend import Backend
from zipage_lang.chat import ChatTemplate
from zipage_lang.errors import RunCancelledError
from zipage_lang.loops import LoopBridge
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run was started with. Calls take `sampling` and `kv` where they say nothing else."""

    backend: Backend
    template: ChatTemplate
    sampling: SamplingParams
    kv: KVParams
    root_seed: int


class Session:
    """The settings, the loop and the running work of one program run."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.bridge = LoopBridge(settings.backend.loop)
        self.group_id = f"run-{uuid.uuid4().hex}"
        self.cancelled_by: RunCancelledError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], on_end: Callable[[], None]) -> None:
        """Start `work` from the loop, on the loop; `on_end` is called there however it ends."""
        task = self.bridge.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: on_end())

    async def drain(self) -> None:
        """Wait, on the loop, until no work is left: branches that nobody joined too."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self, cause: BaseException | None = None) -> None:
        """Give the run up: what is pending raises RunCancelledError, its requests are aborted."""
        error = RunCancelledError()
        error.__cause__ = cause
        if not self.bridge.loop.is_closed():  # a closed engine has dropped its requests itself
            self.bridge.call(lambda: self._cancel_on_loop(error))

    def _cancel_on_loop(self, error: RunCancelledError) -> None:
        if self.cancelled_by is not None:
            return
        self.cancelled_by = error
        for task in self._tasks:
            task.cancel()
        self.spawn(self.settings.backend.abort(self.group_id), lambda: None)


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
