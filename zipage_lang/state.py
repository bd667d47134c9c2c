"""The state `s` of a program: what the body appends to and reads from, blocking or awaited.

Knows nothing of how expressions run or of decorators.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Self

from zipage_lang.branches import AsyncBranches, Branches
from zipage_lang.budgets import Account, Budget
from zipage_lang.interpreter import StateCore
from zipage_lang.ir import Role, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, checked_name
from zipage_lang.kv_report import KVReport
from zipage_lang.loops import LoopBridge
from zipage_lang.meta_info import MetaInfo, kv_report_of, meta_info
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.scratch import adopted, scratch_core
from zipage_lang.stream import Delta, read_logs
from zipage_lang.variables import Variable


class StateHandle:
    """What blocking and async programs have in common: appending never waits."""

    def __init__(self, core: StateCore) -> None:
        self.core = core

    def __iadd__(self, value: Any) -> Self:
        """Append a string or expression. Raises ValueError at once for what can't be appended."""
        self.core.append(value)
        return self

    def append(self, value: Any) -> Self:
        """`s += value` as a method, for lambdas; returns the state."""
        self.core.append(value)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        """Store a plain value; readers find it at once."""
        self.core.assign(name, value)

    def __contains__(self, name: str) -> bool:
        """Whether something was queued or stored under `name`, finished or not."""
        return self.core.variables.find(name) is not None

    def system(self) -> contextlib.AbstractContextManager[None]:
        """`with s.system():` what is appended inside is the system message."""
        return self._role("system")

    def user(self) -> contextlib.AbstractContextManager[None]:
        """As `system`, for a user message."""
        return self._role("user")

    def assistant(self) -> contextlib.AbstractContextManager[None]:
        """As `system`, for an assistant message."""
        return self._role("assistant")

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Generator[None]:
        """`with s.var_scope("x"):` all text appended inside becomes the value of "x"."""
        self.core.append(ScopeBegin(checked_name(name)))
        yield
        self.core.append(ScopeEnd(name))

    def cancel(self, reason: str | None = None) -> None:
        """Give this state up, and all its branches: running requests are aborted at once.

        What is not there yet raises RunCancelledError, which tells the reason; values stay.
        """
        self.core.cancel(reason)

    @property
    def index(self) -> int:
        """Which branch of its fork this is, from 0; 0 for what was never forked."""
        return self.core.place

    @property
    def stop_reason(self) -> str | None:
        """Which limit of a budget last stopped a call of this state ("tokens", "calls", "seconds",
        "kv_tokens"), or kept one from beginning; None while none did. Does not wait.
        """
        return self.core.door.stop_reason

    @contextlib.contextmanager
    def budget(self, budget: Budget | None = None, **limits: Any) -> "Generator[Account]":
        """`with s.budget(tokens=500):` what is appended or forked inside spends from this budget.

        Takes a `Budget` or its fields, and spends from all budgets around it too. Gives its
        account: `reason`, `num_tokens`, `num_calls` so far. Raises ValueError for a bad limit.
        """
        account = self.core.enter(Budget(**limits) if budget is None else budget)
        try:
            yield account
        finally:
            self.core.leave(account)

    @property
    def root_seed(self) -> int:
        """Give it to `run(seed=...)` to draw the same samples again."""
        return self.core.session.settings.root_seed

    @contextlib.contextmanager
    def _role(self, role: Role) -> Generator[None]:
        self.core.append(RoleBegin(role))
        yield
        self.core.append(RoleEnd(role))

    def _spell(self, token_id: int) -> str:
        backend = self.core.session.settings.backend
        return backend.decode([token_id], skip_special_tokens=False)

    def _known(self, name: str) -> Variable:
        variable = self.core.variables.find(name)
        if variable is None:
            raise KeyError(name)
        return variable


class ProgramState(StateHandle):
    """The state of a `def` program, and what `run` returns: reads block until the value is there.

    Parameters: none of a program's concern; states are made by `run` and `fork`.

    Errors: a failed call raises its own error where its value (or the text behind it) is read; a
    name never queued is a KeyError.

    >>> state = zipage.function(lambda s: s.append("1 + 1 = " + zipage.gen("sum"))).run()
    >>> state["sum"], state.text(), state.error()
    ('42', '1 + 1 = 42', None)
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
        """The RequestOutput behind `name` (a list for n > 1), or the ScoreResult of a select."""
        return self._bridge.result(self._find(name).meta)

    def get_var(self, name: str) -> Any:
        """SGLang's `s[name]`."""
        return self[name]

    def get_meta_info(self, name: str) -> MetaInfo | None:
        """SGLang's view of `meta(name)` as a dict; None for a name without a call."""
        return meta_info(self.meta(name), self._spell) if name in self else None

    def kv(self, name: str | None = None) -> KVReport:
        """What the call behind `name` kept and dropped of the KV cache; None: all calls of this
        state (since its fork) together.
        """
        if name is None:
            self.sync()
            return self.core.kv_report
        return kv_report_of(self.meta(name))

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

    @contextlib.contextmanager
    def copy(self, *, kv: KVParams | None = None) -> "Generator[ProgramState]":
        """`with s.copy() as t:` a branch whose text does not stay; its values come back, each as a
        list of one.
        """
        branches = self.fork(1, kv=kv)
        yield branches[0]
        branches.join()

    def fork(
        self, num_branches: int = 1, *, kv: KVParams | None = None, budget: Budget | None = None
    ) -> Branches["ProgramState"]:
        """Branches that go on from here and share these exact tokens; `kv` bounds their calls.

        `budget` is for each of them; all spend from the budgets around the fork too.
        """
        cores = self.core.fork(num_branches, kv, budget)
        return Branches(self.core, [ProgramState(core) for core in cores])

    @contextlib.contextmanager
    def scratch(self) -> "Generator[ProgramState]":
        """`with s.scratch() as t:` what is appended to `t` goes on from here, and does not stay.

        The values of `t` are those of `s` afterwards, at once and without waiting. May be nested.

        >>> def program(s):
        ...     with s.scratch() as t:
        ...         t += "Think: " + zipage.gen("idea")
        ...     return s["idea"], s.text()
        >>> zipage.function(program).run(backend=zipage.testing.ScriptedBackend("hm")).ret_value
        ('hm', '')
        """
        with scratch_core(self.core) as core:
            yield ProgramState(core)

    def adopt(self, branch: "StateHandle") -> None:
        """Wait for a branch of this state, then append what it said, token by token, and take over
        its values. Raises the branch's error.
        """
        self._bridge.wait(adopted(self.core, branch.core))

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Generated text as it comes: of `name`, or of all calls. A failure is raised in place."""
        return self._bridge.iterate(_texts(self, name))

    def text_async_iter(
        self, name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """`text_iter` for a reader on any event loop.

        With `return_meta_data` pairs of a piece and what is known of its call: its name, and the
        tokens drawn so far as "completion_tokens".
        """
        return self._bridge.iterate_async(_texts_or_pairs(self, name, return_meta_data))

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
    """The state of an `async def` program: reads are awaited, `await s["x"]`.

    Parameters and errors: as for ProgramState.

    >>> async def body(s): return await s.append(zipage.gen("a"))["a"]
    >>> zipage.function(body).run().ret_value
    '42'
    """

    def __getitem__(self, name: str) -> Awaitable[Any]:
        """As ProgramState's, to be awaited; KeyError at once for a name never queued."""
        return asyncio.wrap_future(self._known(name).value)

    def meta(self, name: str) -> Awaitable[Any]:
        """As ProgramState.meta."""
        return asyncio.wrap_future(self._known(name).meta)

    def get_var(self, name: str) -> Awaitable[Any]:
        """As ProgramState.get_var."""
        return self[name]

    async def get_meta_info(self, name: str) -> MetaInfo | None:
        """As ProgramState.get_meta_info."""
        return meta_info(await self.meta(name), self._spell) if name in self else None

    async def kv(self, name: str | None = None) -> KVReport:
        """As ProgramState.kv."""
        if name is None:
            await self.sync()
            return self.core.kv_report
        return kv_report_of(await self.meta(name))

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

    def scratch(self) -> "contextlib.AbstractContextManager[AsyncState]":
        """As ProgramState.scratch: a plain `with`, since nothing is waited for."""
        return self._scratch()

    @contextlib.contextmanager
    def _scratch(self) -> "Generator[AsyncState]":
        with scratch_core(self.core) as core:
            yield AsyncState(core)

    async def adopt(self, branch: StateHandle) -> None:
        """As ProgramState.adopt."""
        await adopted(self.core, branch.core)

    @contextlib.asynccontextmanager
    async def copy(self, *, kv: KVParams | None = None) -> "AsyncGenerator[AsyncState]":
        """As ProgramState.copy, with `async with`."""
        branches = self.fork(1, kv=kv)
        yield branches[0]
        await branches.join()

    def fork(
        self, num_branches: int = 1, *, kv: KVParams | None = None, budget: Budget | None = None
    ) -> AsyncBranches["AsyncState"]:
        """As ProgramState.fork."""
        cores = self.core.fork(num_branches, kv, budget)
        return AsyncBranches(self.core, [AsyncState(core) for core in cores])

    def text_async_iter(
        self, name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """As ProgramState.text_async_iter."""
        return _texts_or_pairs(self, name, return_meta_data)

    async def _when_known(self, name: str) -> Variable:
        return self._known(name)

    async def _when_all_done(self) -> None:
        await _drained(self.core)


async def _drained(core: StateCore) -> None:
    await asyncio.wrap_future(core.barrier())
    if core.error is not None:
        raise core.error


def _texts_or_pairs(
    state: ProgramState | AsyncState, name: str | None, return_meta_data: bool
) -> AsyncIterator[Any]:
    return _pairs(state, name) if return_meta_data else _texts(state, name)


async def _texts(state: ProgramState | AsyncState, name: str | None) -> AsyncGenerator[str, None]:
    """Runs on the loop."""
    async with contextlib.aclosing(_deltas(state, name)) as deltas:
        async for delta in deltas:
            yield delta.text


async def _pairs(
    state: ProgramState | AsyncState, name: str | None
) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    num_drawn: Counter[int] = Counter()
    async with contextlib.aclosing(_deltas(state, name)) as deltas:
        async for delta in deltas:
            num_drawn[delta.call_index] += delta.num_tokens
            told = {"name": delta.name, "completion_tokens": num_drawn[delta.call_index]}
            yield delta.text, told


def _deltas(state: ProgramState | AsyncState, name: str | None) -> AsyncGenerator[Delta, None]:
    return _all_deltas(state) if name is None else _deltas_of(state, name)


async def _all_deltas(state: ProgramState | AsyncState) -> AsyncGenerator[Delta, None]:
    log = state.core.deltas
    async with contextlib.aclosing(read_logs([log], state._when_all_done())) as items:
        async for _, delta in items:
            if delta.text and delta.sample_index == 0:
                yield delta


async def _deltas_of(state: ProgramState | AsyncState, name: str) -> AsyncGenerator[Delta, None]:
    variable = await state._when_known(name)
    call = (name, variable.call_index, 0)
    has_streamed = False
    log = state.core.deltas
    async with contextlib.aclosing(read_logs([log], _value_of(variable))) as items:
        async for _, delta in items:
            if delta.text and (delta.name, delta.call_index, delta.sample_index) == call:
                has_streamed = True
                yield delta
    if not has_streamed:  # assigned, or generated before this branch was forked
        value = variable.value.result()
        if value:
            text = str(value[0] if isinstance(value, list) else value)
            yield Delta(name, text, 0, variable.call_index)


async def _value_of(variable: Variable) -> None:
    await asyncio.wrap_future(variable.value)
