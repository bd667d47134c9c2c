"""Keeps an engine running: starts it, and starts it again when its process dies.

Knows nothing of requests or HTTP.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.errors import EngineStartError

MAX_DEATHS = 3
DEATH_WINDOW_S = 60.0
BACKOFF_S = (0.2, 2.0)  # before the start behind the first and the second death

log = logging.getLogger("zipage.server")

LLMFactory = Callable[[], Awaitable[AsyncLLM]]


class Supervisor:
    """An engine that comes back. `state` is starting, ready, or dead; `llm` is there while ready.

    After three deaths within a minute it gives up. `failure` is why the engine last died or could
    not start.
    """

    def __init__(self, llm_factory: LLMFactory) -> None:
        self.state = "starting"
        self.llm: AsyncLLM | None = None
        self.failure: str | None = None
        self.num_restarts = 0
        self._factory = llm_factory
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._first: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, or wait for the start under way.

        Raises what the factory raises; then the state is "dead".
        """
        if self._first is None:
            self._first = asyncio.create_task(self._start_first(), name="zipage-first-start")
        await asyncio.shield(self._first)

    async def close(self) -> None:
        """End the engine, or its start. May be called again."""
        tasks = [task for task in (self._watcher, self._first) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        llm, self.llm, self.state = self.llm, None, "dead"
        if llm is not None:
            await llm.close()

    async def _start_first(self) -> None:
        try:
            await self._load()
        except Exception as error:
            self.state, self.failure = "dead", str(error)
            raise
        self._watcher = asyncio.create_task(self._watch(), name="zipage-supervisor")

    async def _load(self) -> None:
        self.llm = await self._factory()
        self.state = "ready"

    async def _watch(self) -> None:
        while self.llm is not None:
            self._note_death(str(await self.llm.wait_end()))
            llm, self.llm = self.llm, None
            await llm.close()
            while self.state == "starting":
                await self._try_again()

    async def _try_again(self) -> None:
        await asyncio.sleep(BACKOFF_S[len(self._deaths) - 1])
        try:
            await self._load()
        except Exception as error:  # whatever it is, nobody else would hear of it
            if not isinstance(error, EngineStartError | ValueError | OSError):
                log.exception("an engine's start ended in a way that is not foreseen")
            self._note_death(f"it did not come up: {error}")
            return
        self.num_restarts += 1
        log.warning("the engine is back (restart %d)", self.num_restarts)

    def _note_death(self, reason: str) -> None:
        self.failure = reason
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > DEATH_WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) < MAX_DEATHS:
            self.state = "starting"
            log.error("the engine died: %s; it is started again", reason)
            return
        self.state = "dead"
        log.critical(
            "the engine died %d times within %.0f s and is given up; restart the server once the "
            "cause is gone: %s",
            MAX_DEATHS,
            DEATH_WINDOW_S,
            reason,
        )
