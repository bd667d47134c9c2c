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


MAX_MERGED_LEN = 1024  # characters; bounds what merging copies for each token


class DeltaLog:
    """All that one state generated, kept so that a late reader sees it too. Used on the loop only.

    A reader gets each delta as it comes; what came before him is merged into larger ones, since
    an object for each token of thousands of branches would take more room than their text.
    """

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._readers: list[Callable[[Delta], None]] = []

    def publish(self, delta: Delta) -> None:
        if self._deltas and _may_merge(self._deltas[-1], delta):
            self._deltas[-1] = _merged(self._deltas[-1], delta)
        else:
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


def _may_merge(last: Delta, new: Delta) -> bool:
    same_call = (last.call_index, last.sample_index) == (new.call_index, new.sample_index)
    return same_call and len(last.text) < MAX_MERGED_LEN


def _merged(last: Delta, new: Delta) -> Delta:
    return dataclasses.replace(
        last, text=last.text + new.text, num_tokens=last.num_tokens + new.num_tokens
    )


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
