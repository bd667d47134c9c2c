"""Generated text on its way to readers, as it comes.

Knows nothing of requests, tokens or programs.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of generated text. `call_index` tells apart calls that store under the same name."""

    name: str | None
    text: str
    num_tokens: int
    call_index: int
    sample_index: int = 0


@dataclasses.dataclass(frozen=True)
class BranchDelta:
    """A piece of text that branch `branch` generated under `name`, `num_tokens` long."""

    branch: int
    name: str | None
    text: str
    num_tokens: int


class DeltaLog:
    """All deltas of one state, kept so that a late reader sees them too. Used on the loop only."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._readers: list[Callable[[Delta], None]] = []

    def publish(self, delta: Delta) -> None:
        self._deltas.append(delta)
        for reader in self._readers:
            reader(delta)

    def subscribe(self, reader: Callable[[Delta], None]) -> None:
        """Call `reader` for every delta so far and from now on."""
        for delta in self._deltas:
            reader(delta)
        self._readers.append(reader)

    def unsubscribe(self, reader: Callable[[Delta], None]) -> None:
        self._readers.remove(reader)


Reader = Callable[[Delta], None]


async def read_logs(
    logs: list[DeltaLog], end: Coroutine[Any, Any, object]
) -> AsyncGenerator[tuple[int, Delta]]:
    """Deltas of all logs as they come, with the log's index, until `end` is done; its error is
    raised.
    """
    queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()
    ending = asyncio.ensure_future(end)
    ending.add_done_callback(lambda _: queue.put_nowait(None))
    readers = [_reader(index, queue) for index in range(len(logs))]
    for log, reader in zip(logs, readers, strict=True):
        log.subscribe(reader)
    try:
        while (item := await queue.get()) is not None:
            yield item
        await ending
    finally:
        for log, reader in zip(logs, readers, strict=True):
            log.unsubscribe(reader)
        ending.cancel()


def _reader(index: int, queue: "asyncio.Queue[tuple[int, Delta] | None]") -> Reader:
    return lambda delta: queue.put_nowait((index, delta))
