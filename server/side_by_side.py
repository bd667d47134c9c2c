"""Several pieces of work side by side, as one: streams merged, results gathered in order.

Knows nothing of what the work is.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
MAX_AHEAD = 64  # items that wait for whoever takes them: each may be a whole output so far


async def gathered(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. The first error ends all, and is raised itself."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """(place of the stream, item), in the order they come.

    The first error ends all; closing this closes all. Who takes slowly slows the streams.
    """
    if len(streams) == 1:  # the usual case, without a task and a queue in between
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(MAX_AHEAD)
    tasks = [
        asyncio.create_task(_pump(place, stream, arrived)) for place, stream in enumerate(streams)
    ]
    try:
        num_open = len(tasks)
        while num_open:
            found = await arrived.get()
            if found is None:
                num_open -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    place: int,
    stream: AsyncGenerator[T, None],
    arrived: "asyncio.Queue[tuple[int, T] | BaseException | None]",
) -> None:
    try:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await arrived.put((place, item))
    except Exception as error:
        await arrived.put(error)
    else:
        await arrived.put(None)
