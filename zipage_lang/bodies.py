"""Runs what a program gives for each branch: an expression, a function, another program.

Expressions and `async def` bodies take no thread; `def` bodies that read take one while they run.
Knows nothing of votes, scores' use or search.
"""

import asyncio
import functools
import inspect
import re
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from zipage_lang.async_state import AsyncState
from zipage_lang.branches import AsyncBranches, Branches
from zipage_lang.ir import Expr
from zipage_lang.program import Program
from zipage_lang.program_state import ProgramState
from zipage_lang.scratch import scratch_core
from zipage_lang.state import StateHandle
from zipage_lang.state_core import StateCore

T = TypeVar("T")
Body = Any  # an expression, a function of the branch, or a program
MAX_THREADS = 64
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class Bodies:
    """Runs bodies on branches of one state. Used on the loop; close it when done."""

    def __init__(self, state: StateHandle, num_branches: int) -> None:
        self._is_async = isinstance(state, AsyncState)
        self._num_threads = min(num_branches, MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None

    def handle(self, core: StateCore) -> StateHandle:
        """The branch as the program that called would see it."""
        return AsyncState(core) if self._is_async else ProgramState(core)

    async def run(self, body: Body, core: StateCore) -> Any:
        """What the body gives on this branch: its return value, or its last named value."""
        if isinstance(body, str | Expr):
            core.append(body)
            return await asyncio.wrap_future(_last_value(core))
        if getattr(body, "is_async", inspect.iscoroutinefunction(body)):
            return await body(AsyncState(core))
        if self._is_async and not isinstance(body, Program):
            given = body(AsyncState(core))
            return await given if inspect.isawaitable(given) else given
        pool = self._threads()
        return await asyncio.get_running_loop().run_in_executor(pool, body, ProgramState(core))

    async def score(self, scorer: Body, core: StateCore) -> float:
        """The scorer's number for this branch; expressions and programs leave no text in it."""
        if isinstance(scorer, str | Expr | Program):
            with scratch_core(core) as frame:
                return as_number(await self.run(scorer, frame))
        return as_number(await self.run(scorer, core))

    def close(self) -> None:
        """No body is started any more; those that run end with their branches."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "zipage-branch")
        return self._pool


def check_body(body: Body, what: str) -> None:
    """Raises ValueError for what can't be run on a branch."""
    if not isinstance(body, str | Expr) and not callable(body):
        raise ValueError(f"{what}={body!r} must be a gen, a function of the branch, or a program")


def wait_for(state: StateHandle, work: Coroutine[Any, Any, T]) -> Any:
    """The work's result in a `def` program, an awaitable of it in an `async def` one."""
    if isinstance(state, AsyncState):
        return work
    return state.core.session.bridge.wait(work)


async def as_ended(tasks: "list[asyncio.Task[Any]]") -> AsyncGenerator[int, None]:
    """The tasks' places, each when it has ended."""
    ended: asyncio.Queue[int] = asyncio.Queue()
    for index, task in enumerate(tasks):
        task.add_done_callback(functools.partial(_put, ended, index))
    for _ in tasks:
        yield await ended.get()


def _put(ended: "asyncio.Queue[int]", index: int, _: object) -> None:
    ended.put_nowait(index)


async def end_tasks(tasks: "list[asyncio.Task[Any]]", cores: list[StateCore], why: str) -> int:
    """Cancel the branches whose tasks still run, and wait until they have let go of all.

    Returns how many there were.
    """
    running = [index for index, task in enumerate(tasks) if not task.done()]
    for index in running:
        cores[index].cancel(why)
        tasks[index].cancel()
    if running:
        await asyncio.wait([tasks[index] for index in running])
    for index in running:
        await cores[index].settled()
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that nobody is told of it at the end
    return len(running)


def stop_reason_of(cores: list[StateCore]) -> str | None:
    """ "budget: ..." where a budget stopped a call of one of these branches."""
    reasons = [core.door.stop_reason for core in cores if core.door.stop_reason is not None]
    return f"budget: {reasons[0]}" if reasons else None


def group_of(s: StateHandle, cores: list[StateCore]) -> Any:
    """These branches of `s` as `s.fork` would give them."""
    if isinstance(s, AsyncState):
        return AsyncBranches(s.core, [AsyncState(core) for core in cores])
    return Branches(s.core, [ProgramState(core) for core in cores])


def as_number(value: Any) -> float:
    """A score: a number, or the first one in a text. Raises ValueError where there is none."""
    if isinstance(value, int | float):
        return float(value)
    found = NUMBER.search(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{value!r} is no score; give a number or a text with one")
    return float(found.group())


def _last_value(core: StateCore) -> Any:
    names = core.variables.own_names
    if not names:
        raise ValueError("the body gives no value; name its gen: gen('answer')")
    variable = core.variables.find(names[-1])
    assert variable is not None, f"{names[-1]} was written and is not there"
    return variable.value
