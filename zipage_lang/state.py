"""The state `s` of a program: what the body appends to and reads from, blocking or awaited.

Knows nothing of how expressions run or of decorators.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Self

from zipage_lang.branches import AsyncBranches, Branches
from zipage_lang.interpreter import StateCore
from zipage_lang.ir import Role, RoleBegin, RoleEnd
from zipage_lang.loops import LoopBridge
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.stream import read_logs
from zipage_lang.variables import Variable


class StateHandle:
    """What blocking and async programs have in common: appending never waits."""

    def __init__(self, core: StateCore) -> None:
        self.core = core

    def __iadd__(self, value: Any) -> Self:
        """Append a string or expression. Raises ValueError at once for what can't be appended."""
        self.core.append(value)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        self.core.assign(name, value)

    def __contains__(self, name: str) -> bool:
        """Whether something was queued or stored under `name`, finished or not."""
        return self.core.variables.find(name) is not None

    def system(self) -> contextlib.AbstractContextManager[None]:
        """`with s.system():` what is appended inside is the system message."""
        return self._role("system")

    def user(self) -> contextlib.AbstractContextManager[None]:
        return self._role("user")

    def assistant(self) -> contextlib.AbstractContextManager[None]:
        return self._role("assistant")

    @property
    def root_seed(self) -> int:
        """Give it to `run(seed=...)` to draw the same samples again."""
        return self.core.session.settings.root_seed

    @contextlib.contextmanager
    def _role(self, role: Role) -> Generator[None]:
        self.core.append(RoleBegin(role))
        yield
        self.core.append(RoleEnd(role))

    def _known(self, name: str) -> Variable:
        variable = self.core.variables.find(name)
        if variable is None:
            raise KeyError(name)
        return variable


class ProgramState(StateHandle):
    """The state of a `def` program, and what `run` returns: reads block until the value is there.

    A failed call raises its own error where its value (or the text behind it) is read.
    """

    def __init__(self, core: StateCore, body: "Future[Any] | None" = None) -> None:
        super().__init__(core)
        self._body = body

    @property
    def ret_value(self) -> Any:
        """What the program's body returned. Raises what it raised; None inside of the body."""
        return None if self._body is None else self._bridge.result(self._body)

    def __getitem__(self, name: str) -> Any:
        """The value of `name`, once its call is done. KeyError at once for a name never queued."""
        return self._bridge.result(self._find(name).value)

    def meta(self, name: str) -> Any:
        """The RequestOutput behind `name` (a list for n > 1), or the SelectOutput of a select."""
        return self._bridge.result(self._find(name).meta)

    def text(self) -> str:
        """All text so far, the author's and the generated."""
        self._finish()
        return self.core.text

    def token_ids(self) -> list[int]:
        """The state as tokens: just what the next request's prompt would be."""
        self._finish()
        return self.core.token_ids

    def messages(self) -> list[dict[str, str]]:
        """The closed chat messages, as {"role", "content"}."""
        self._finish()
        return self.core.messages

    def sync(self) -> None:
        """Wait until all that was appended has run. Raises nothing; see `error()`."""
        if self._body is not None:
            self._bridge.check_may_block()
            self._body.exception()
        self._bridge.result(self.core.barrier())

    def error(self) -> BaseException | None:
        """Wait, then what ended this state or its body, if anything did."""
        self.sync()
        body_error = None if self._body is None else self._body.exception()
        return body_error or self.core.error

    def fork(self, num_branches: int, *, kv: KVParams | None = None) -> Branches["ProgramState"]:
        """Branches that go on from here and share these exact tokens; `kv` bounds their calls."""
        return Branches(self.core, [ProgramState(c) for c in self.core.fork(num_branches, kv)])

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Generated text as it comes: of `name`, or of all calls. A failure is raised in place."""
        return self._bridge.iterate(_texts(self, name))

    def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """`text_iter` for a reader on any event loop."""
        return self._bridge.iterate_async(_texts(self, name))

    @property
    def _bridge(self) -> LoopBridge:
        return self.core.session.bridge

    def _find(self, name: str) -> Variable:
        if self._body is None or self._body.done():
            if self._body is not None and name not in self:
                self._body.result()  # a body that raised says why the name is missing
            return self._known(name)
        found = self._bridge.result(self.core.variables.when_named(name))
        return found or self._find(name)

    def _finish(self) -> None:
        error = self.error()
        if error is not None:
            raise error

    async def _when_known(self, name: str) -> Variable:
        if self._body is not None and not self._body.done():
            await asyncio.wrap_future(self.core.variables.when_named(name))
        return self._find(name)

    async def _when_all_done(self) -> None:
        if self._body is not None:
            await asyncio.wrap_future(self._body)
        await _drained(self.core)


class AsyncState(StateHandle):
    """The state of an `async def` program: reads are awaited, `await s["x"]`."""

    def __getitem__(self, name: str) -> Awaitable[Any]:
        """As ProgramState's, to be awaited; KeyError at once for a name never queued."""
        return asyncio.wrap_future(self._known(name).value)

    def meta(self, name: str) -> Awaitable[Any]:
        """As ProgramState.meta."""
        return asyncio.wrap_future(self._known(name).meta)

    async def text(self) -> str:
        """As ProgramState.text."""
        await _drained(self.core)
        return self.core.text

    async def token_ids(self) -> list[int]:
        """As ProgramState.token_ids."""
        await _drained(self.core)
        return self.core.token_ids

    async def messages(self) -> list[dict[str, str]]:
        """As ProgramState.messages."""
        await _drained(self.core)
        return self.core.messages

    async def sync(self) -> None:
        """As ProgramState.sync."""
        await asyncio.wrap_future(self.core.barrier())

    async def error(self) -> BaseException | None:
        """As ProgramState.error."""
        await self.sync()
        return self.core.error

    def fork(self, num_branches: int, *, kv: KVParams | None = None) -> AsyncBranches["AsyncState"]:
        """As ProgramState.fork."""
        return AsyncBranches(self.core, [AsyncState(c) for c in self.core.fork(num_branches, kv)])

    def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """As ProgramState.text_async_iter."""
        return _texts(self, name)

    async def _when_known(self, name: str) -> Variable:
        return self._known(name)

    async def _when_all_done(self) -> None:
        await _drained(self.core)


async def _drained(core: StateCore) -> None:
    await asyncio.wrap_future(core.barrier())
    if core.error is not None:
        raise core.error


def _texts(state: ProgramState | AsyncState, name: str | None) -> AsyncIterator[str]:
    """Runs on the loop."""
    return _all_texts(state) if name is None else _texts_of(state, name)


async def _all_texts(state: ProgramState | AsyncState) -> AsyncIterator[str]:
    log = state.core.deltas
    async with contextlib.aclosing(read_logs([log], state._when_all_done())) as items:
        async for _, delta in items:
            if delta.text and delta.sample_index == 0:
                yield delta.text


async def _texts_of(state: ProgramState | AsyncState, name: str) -> AsyncIterator[str]:
    variable = await state._when_known(name)
    call = (name, variable.call_index, 0)
    has_streamed = False
    log = state.core.deltas
    async with contextlib.aclosing(read_logs([log], _value_of(variable))) as items:
        async for _, delta in items:
            if delta.text and (delta.name, delta.call_index, delta.sample_index) == call:
                has_streamed = True
                yield delta.text
    if not has_streamed:  # assigned, or generated before this branch was forked
        value = variable.value.result()
        if value:
            yield str(value[0] if isinstance(value, list) else value)


async def _value_of(variable: Variable) -> None:
    await asyncio.wrap_future(variable.value)
