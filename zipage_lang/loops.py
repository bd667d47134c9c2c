"""The bridge between blocking code and the event loop that does the work.

Knows nothing of programs, states or engines.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from zipage_lang.errors import LoopThreadError

T = TypeVar("T")


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """The loop of all backends that bring none of their own; its thread starts here, once."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="zipage-loop", daemon=True).start()
    return loop


def new_future() -> "Future[Any]":
    """A future that a waiter who leaves can't cancel for the others."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def done_future(value: T) -> "Future[T]":
    future: Future[T] = Future()
    future.set_result(value)
    return future


class LoopBridge:
    """Hands work to one loop, from its own thread or any other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def is_current(self) -> bool:
        """Whether the caller runs on the loop itself, where it must not block."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def check_may_block(self) -> None:
        """Raises LoopThreadError on the loop's own thread."""
        if self.is_current():
            raise LoopThreadError

    def call(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop: now when on it, else soon."""
        if self.is_current():
            callback()
        else:
            self.loop.call_soon_threadsafe(callback)

    def result(self, future: "Future[T]") -> T:
        """Block until `future` is done. Raises its error; LoopThreadError where it can't end."""
        if not future.done():
            self.check_may_block()
        return future.result()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and block until it is done."""
        if self.is_current():
            work.close()
            raise LoopThreadError
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def join(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which must run on the bridge's loop, from any loop."""
        if self.is_current():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Blocking iteration over an async iterator that lives on the loop."""
        self.check_may_block()
        try:
            while True:
                try:
                    item = self.wait(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self.wait(_close(items))

    async def iterate_async(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """The same for a reader on any loop."""
        try:
            while True:
                try:
                    item = await self.join(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            await self.join(_close(items))


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


async def _close(items: AsyncIterator[T]) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()
