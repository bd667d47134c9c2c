"""Takes pictures of the engine for all who watch: one at a time, and none while nobody asks.

Knows nothing of HTTP or of how a picture is drawn.
"""

import asyncio
import time
from collections import deque

import msgspec

from zipage_lang.frontend.errors import EngineClosedError, EngineDiedError
from zipage_lang.runtime.snapshot import Snapshot
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.service import Service

MIN_INTERVAL_S = 0.3
MAX_SHARE = 0.01  # of the engine's time may go to pictures: large pools are looked at less often
PATIENCE_S = 2.0  # a step may be long; then the last picture must do
HISTORY_INTERVAL_S = 1.0
HISTORY_LEN = 600


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """A line of the history. Counts are totals since the engine's start."""

    at_s: float  # seconds since 1970
    engine: int  # which engine, counted from 0
    num_decoded: int
    num_prefilled: int
    num_running: int
    num_waiting: int
    num_asked: int  # prompt tokens looked up in the tree
    num_hit: int  # of them found


class Watcher:
    """The newest picture and the history of the last minutes in which somebody watched."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._latest: Snapshot | None = None
        self._engine = 0  # whose it is
        self._history: deque[Moment] = deque(maxlen=HISTORY_LEN)
        self._taking: asyncio.Task[None] | None = None
        self._next_at = 0.0

    @property
    def interval_s(self) -> float:
        """How long to wait between two pictures."""
        taken_s = 0.0 if self._latest is None else self._latest.taken_s
        return max(MIN_INTERVAL_S, taken_s / MAX_SHARE)

    async def look(self) -> Snapshot | None:
        """The newest picture, a new one if the last is old enough; None while no engine is up."""
        if self._engine != self._service.num_restarts:  # no picture of an engine that is gone
            self._engine, self._latest, self._next_at = self._service.num_restarts, None, 0.0
        if self._taking is None and time.monotonic() >= self._next_at:
            self._taking = asyncio.create_task(self._take(), name="zipage-picture")
        if self._taking is not None:
            await asyncio.wait([self._taking], timeout=PATIENCE_S)
        return self._latest

    def history(self, since_s: float) -> list[Moment]:
        """What was seen after `since_s` (seconds since 1970), oldest first."""
        return [moment for moment in self._history if moment.at_s > since_s]

    async def _take(self) -> None:
        engine = self._service.num_restarts
        try:
            self._latest = await self._service.llm.snapshot()
            self._remember(self._latest, engine)
        except (ApiError, EngineDiedError, EngineClosedError):
            self._latest = None
        finally:
            self._taking = None
            self._next_at = time.monotonic() + self.interval_s

    def _remember(self, snapshot: Snapshot, engine: int) -> None:
        now = time.time()
        if self._history and now - self._history[-1].at_s < HISTORY_INTERVAL_S:
            return
        stats = snapshot.stats
        names = ("num_decoded_tokens", "num_prefilled_tokens", "num_running", "num_waiting")
        counts = [int(stats[name]) for name in (*names, "num_tokens_asked", "num_tokens_hit")]
        self._history.append(Moment(now, engine, *counts))
