"""Runs one state's queue in order on the event loop, without a thread of its own.

Whatever is put into the queue waits there, and one coroutine takes it off piece by piece; it ends
when the queue is empty. A branch's queue starts to move when its parent reaches the fork.
Knows nothing of programs, of what an expression means before it is planned, or of requests.
"""

import asyncio
import dataclasses
import weakref
from collections import deque
from concurrent.futures import Future

from zipage_lang.budgets import Account
from zipage_lang.call_runner import CallRunner
from zipage_lang.door import open_door
from zipage_lang.errors import RunCancelledError
from zipage_lang.ir import Keep, RoleBegin, RoleEnd, ScopeBegin, Text
from zipage_lang.loops import new_future
from zipage_lang.plan import GenCall, Planned, ScopeClose, SelectCall
from zipage_lang.session import Session
from zipage_lang.state_text import StateText
from zipage_lang.trace_node import NodeTrace


@dataclasses.dataclass(frozen=True, eq=False)
class Fork:
    """The place in the parent's queue where branches take over a copy of its text."""

    branches: "list[Interpreter]"


@dataclasses.dataclass(frozen=True, eq=False)
class SetAccount:
    """From here on calls are charged to this budget and those around it."""

    account: Account | None


@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """Nobody will go on from here, so the engine need not keep it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Splice:
    """The place where what a finished branch said is appended."""

    branch: "Interpreter"


@dataclasses.dataclass(frozen=True, eq=False)
class Barrier:
    """Done when all before it in the queue is, failed or not."""

    reached: "Future[None]" = dataclasses.field(default_factory=new_future)


Item = Planned | Fork | Splice | SetAccount | Release | Barrier


class Interpreter:
    """The queue of one state or branch. Filled from any one thread; all else is on the loop."""

    def __init__(self, session: Session, fork_kind: str) -> None:
        self.error: BaseException | None = None  # what ended this state; nothing runs after it
        self.trace: NodeTrace | None = None  # None: nobody traces this run
        self.fork_kind = fork_kind
        self.text = StateText(session.settings)
        self.door = open_door(session)
        self.calls = CallRunner(self.door, self.text, session.group_id)
        self._session = session
        self._queue: deque[Item] = deque()
        self._is_running = False  # a task works on the queue
        self._is_working = False  # and is in the middle of an item
        self._has_started = False
        self._task: asyncio.Task[None] | None = None
        self._children: weakref.WeakSet[Interpreter] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all that was put has run or failed."""
        return not self._queue and not self._is_working

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, and nothing ever will: the engine was closed."""
        is_done = not self._queue and not self._is_running
        return is_done and self._session.bridge.loop.is_closed()

    def put(self, *items: Item) -> None:
        """Queue these, from the program's thread; returns at once."""
        self._queue.extend(items)
        self._session.bridge.call(self._kick)

    def begin(self) -> None:
        """Let the queue move: a root at once, a branch at its fork."""
        self._has_started = True
        self._kick()

    def cancel(self, error: RunCancelledError) -> None:
        """Give this and all its branches up; what waits fails now, its fork reached or not."""
        for child in list(self._children or ()):
            child.cancel(error)
        if self.trace is not None and self.error is None:
            self.trace.cancel(error.reason or "cancelled")
        self.error = self.error or error
        self.door.is_cancelled = True
        self.door.release()
        if self._task is not None:
            self._task.cancel()
        self.begin()

    def _kick(self) -> None:
        if self._has_started and not self._is_running and self._queue:
            self._is_running = True
            self._task = self._session.spawn(self._drain(), self._stop)

    async def _drain(self) -> None:
        while self._queue:
            await self._run_or_fail(self._queue.popleft())

    def _stop(self) -> None:
        """The drain is over; had it been cancelled before its first step, what waits fails now."""
        self._is_running = False
        self._task = None
        self._kick()

    async def _run_or_fail(self, item: Item) -> None:
        self.error = self.error or self._session.cancelled_by
        try:
            if isinstance(item, Barrier):
                item.reached.set_result(None)
            elif isinstance(item, Release):
                self.door.release()
                if self.trace is not None:
                    self.trace.released()
            elif self.error is not None:
                self._fail(item, self.error)
            else:
                self._is_working = True
                await self._run(item)
        except asyncio.CancelledError:
            self.error = self.error or self._session.cancelled_by or RunCancelledError()
            self._fail(item, self.error)
            _go_on_after_cancellation()
        except Exception as error:  # any: it is raised again where the value is read
            self.error = error
            self._fail(item, error)
        finally:
            self._is_working = False

    async def _run(self, item: Item) -> None:
        if self.trace is not None:
            self.trace.item(item)
        match item:
            case Text(text):
                self.text.write(text)
            case Keep(text):
                self.text.keep(text)
            case ScopeBegin(name):
                self.text.open_scope(name)
            case ScopeClose(variable):
                variable.fill(self.text.close_scope(variable.name), None)
            case RoleBegin(role):
                self.text.begin_role(role)
            case RoleEnd():
                self.text.end_role()
            case GenCall() | SelectCall():
                await self.calls.run(item, self.trace)
            case Fork(branches):
                self._run_fork(branches)
            case SetAccount(account):
                self.door.account = account
            case Splice(branch):
                self._run_splice(branch)

    def _fail(self, item: Item, error: BaseException) -> None:
        if self.trace is not None:
            self.trace.fail(item, error)
        match item:
            case GenCall() | SelectCall() | ScopeClose():
                for variable in item.variables:
                    variable.fail(error)
            case Fork(branches):
                for branch in branches:
                    branch.error = error
                    branch.begin()

    def _run_fork(self, branches: "list[Interpreter]") -> None:
        if self.trace is not None:
            self.trace.fork(branches)
        self._children = self._children or weakref.WeakSet()
        self._children.update(branches)  # they are cancelled with this one from now on
        for branch in branches:
            branch.text.begin_at(self.text)
        self.door.share(self.text.prompt(), [branch.door for branch in branches])
        for branch in branches:
            branch.begin()

    def _run_splice(self, branch: "Interpreter") -> None:
        if self.trace is not None:
            self.trace.splice(branch)
        if self.text.append_branch(branch.text):
            self.door.take_over(branch.door)
        branch.door.release()


def _go_on_after_cancellation() -> None:
    """The rest of the queue must still be failed, so that no reader waits for ever."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
