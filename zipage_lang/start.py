"""One run of a program's body: started here or in the background, waited for or awaited.

Knows nothing of how arguments are found or which backend is meant.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from zipage_lang.async_state import AsyncState
from zipage_lang.loops import LoopBridge, new_future
from zipage_lang.program_state import ProgramState
from zipage_lang.session import RunSettings, Session
from zipage_lang.state_core import StateCore


class Start:
    """One run about to begin: its session, its state, and the ways to wait for it."""

    def __init__(
        self, body: Callable[..., Any], settings: RunSettings, arguments: dict[str, Any]
    ) -> None:
        self.session = Session(settings)
        if settings.trace is not None:
            self.session.trace = settings.trace.begin_run(
                self.session.group_id, body, arguments, settings
            )
        self._body = body
        self._is_async = inspect.iscoroutinefunction(body)
        self._arguments = arguments
        self._core = StateCore.root(self.session)
        self._ended: Future[Any] = new_future()
        self._state = ProgramState(self._core, self._ended)

    def to_the_end(self) -> ProgramState:
        """Run the body in the caller's thread (an async body: on the loop), wait for what it
        queued.
        """
        self._bridge.check_may_block()
        try:
            if self._is_async:
                self._bridge.wait(self._run_on_loop())
            else:
                self._run_body()
            self._ended.result()
            self._state.sync()
            self._bridge.wait(self.session.end())
        except BaseException:
            self.session.cancel()
            raise
        finally:
            if self.session.trace is not None:
                self.session.trace.ended(self.session, self._ended)
        return self._state

    def in_background(self) -> ProgramState:
        """Start the body in a thread (an async body: on the loop) and return at once."""
        if self.session.trace is not None:
            self.session.trace.end_with(self.session, self._ended)
        self._ended.add_done_callback(lambda _: self._end_session_later())
        if self._is_async:
            asyncio.run_coroutine_threadsafe(self._run_on_loop(), self._bridge.loop)
        else:
            threading.Thread(target=self._run_body, name="zipage-body", daemon=True).start()
        return self._state

    def submitted(self, pool: Executor, on_begin: Callable[[], None]) -> "Future[ProgramState]":
        """Run to the end beside others: a `def` body in the pool, an async one on the loop.

        `on_begin` is called there when it is this one's turn.
        """
        if self._is_async:
            on_begin()
            return asyncio.run_coroutine_threadsafe(self.awaited(), self._bridge.loop)
        return pool.submit(self._to_the_end_from, on_begin)

    def cancel(self, reason: str) -> None:
        """Give the run up."""
        self.session.cancel(reason=reason)

    def _to_the_end_from(self, on_begin: Callable[[], None]) -> ProgramState:
        on_begin()
        return self.to_the_end()

    async def awaited(self) -> ProgramState:
        """Run to the end without blocking the caller's loop."""
        try:
            if self._is_async:
                await self._bridge.join(self._run_on_loop())
            else:
                await asyncio.to_thread(self._run_body)
            self._ended.result()
            await self._core.settled()
            await self._bridge.join(self.session.end())
        except BaseException:
            self.session.cancel()
            raise
        finally:
            if self.session.trace is not None:
                await self.session.trace.ended_async(self.session, self._ended)
        return self._state

    def _end_session_later(self) -> None:
        loop = self._bridge.loop
        if not loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.session.end(), loop)

    @property
    def _bridge(self) -> LoopBridge:
        return self.session.bridge

    def _run_body(self) -> None:
        try:
            value = self._body(ProgramState(self._core), **self._arguments)
        except BaseException as error:  # handed on: raised again by `result()`
            self._end_with(error)
        else:
            self._ended.set_result(value)
        self._core.variables.no_more_names()

    async def _run_on_loop(self) -> None:
        try:
            value = await self._body(AsyncState(self._core), **self._arguments)
        except asyncio.CancelledError as error:
            self._end_with(error)
            raise
        except Exception as error:
            self._end_with(error)
        else:
            self._ended.set_result(value)
        self._core.variables.no_more_names()

    def _end_with(self, error: BaseException) -> None:
        self._ended.set_exception(error)
        self.session.cancel(error)
