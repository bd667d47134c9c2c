"""One state as its program uses it: what is appended goes into a queue, and all returns at once.

Knows nothing of blocking readers, decorators, or how the queue is run.
"""

import asyncio
from concurrent.futures import Future
from typing import Any

from zipage_lang.budgets import Account, Budget
from zipage_lang.errors import RunCancelledError
from zipage_lang.interpreter import Barrier, Fork, Interpreter, Release, SetAccount, Splice
from zipage_lang.kv_report import KVReport
from zipage_lang.loops import done_future
from zipage_lang.plan import Call, Planner
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.session import Session
from zipage_lang.trace_node import NodeTrace
from zipage_lang.variables import Variable, Variables


class StateCore:
    """One state or branch. Append from any one thread; what it says is complete once a barrier was
    reached.
    """

    def __init__(
        self,
        session: Session,
        planner: Planner,
        interpreter: Interpreter,
        variables: Variables,
        place: int = 0,
        account: Account | None = None,
    ) -> None:
        self.session = session
        self.variables = variables
        self.place = place  # which branch of its fork this is
        self.account = account  # what is appended next is charged to this
        self.door = interpreter.door
        self.deltas = interpreter.calls.deltas
        self._planner = planner
        self._interpreter = interpreter
        self.door.account = account

    @classmethod
    def root(cls, session: Session) -> "StateCore":
        """The state that a run begins with."""
        settings = session.settings
        interpreter = Interpreter(session, "root")
        core = cls(session, Planner(settings, (), settings.kv), interpreter, Variables())
        interpreter.begin()
        if settings.budget is not None:
            session.bridge.call(core.enter(settings.budget).start_clock)
        interpreter.trace = session.trace.new_node() if session.trace is not None else None
        return core

    def append(self, value: Any) -> None:
        """Queue a string or expression. Raises ValueError for what can't be, and queues nothing."""
        planned = self._planner.plan(value)
        for item in planned:
            for variable in item.variables if isinstance(item, Call) else ():
                if variable.name:
                    self.variables.add(variable)
        self._interpreter.put(*planned)

    def assign(self, name: str, value: Any, meta: Any = None) -> None:
        """Store a plain value under `name`, at once."""
        variable = Variable(name)
        variable.fill(value, meta)
        self.variables.add(variable)

    def fork(
        self,
        num_branches: int,
        kv: KVParams | None,
        budget: Budget | None = None,
        why: str = "fork",
    ) -> "list[StateCore]":
        """Branches that go on from here, once everything queued so far is done.

        `why` is what a trace calls them: fork, scratch, vote, ...
        """
        branches = [
            StateCore(
                self.session,
                planner,
                Interpreter(self.session, why),
                Variables(self.variables.snapshot()),
                place,
                self.account if budget is None else Account(budget, self.account),
            )
            for place, planner in enumerate(self._planner.fork(num_branches, kv))
        ]
        self._interpreter.put(Fork([branch._interpreter for branch in branches]))
        return branches

    def enter(self, budget: Budget) -> Account:
        """Charge what is appended from now on to `budget`, until `leave`."""
        account = self.account = Account(budget, self.account)
        self._interpreter.put(SetAccount(account))
        return account

    def leave(self, account: Account) -> None:
        """End what `enter` began; the innermost first."""
        assert account is self.account, "budgets are left in the order they were entered"
        self.account = account.outer
        self._interpreter.put(SetAccount(self.account))

    def cancel(self, reason: str | None = None) -> None:
        """Give this state and all its branches up: their requests are aborted at once."""
        error = RunCancelledError(reason)
        self.session.bridge.call(lambda: self._interpreter.cancel(error))

    def release(self) -> None:
        """Let the engine drop what it holds for this state, once all that is queued has run."""
        self._interpreter.put(Release())

    def splice(self, branch: "StateCore") -> None:
        """Append what `branch`, which must be drained, said since its fork."""
        self._planner.open_role = branch._planner.open_role
        self._interpreter.put(Splice(branch._interpreter))

    def barrier(self) -> "Future[None]":
        """Done when all that is queued now has run or failed."""
        if self._interpreter.is_over:
            return done_future(None)  # all was done before the engine was closed
        barrier = Barrier()
        self._interpreter.put(barrier)
        return barrier.reached

    async def settled(self) -> None:
        """Wait, on any loop, until all that is queued now has run or failed."""
        await asyncio.wrap_future(self.barrier())

    async def drained(self) -> None:
        """The same, then raise what ended the state, if anything did."""
        await self.settled()
        if self.error is not None:
            raise self.error

    def is_branch_of(self, core: "StateCore") -> bool:
        """Whether it was forked from `core`, or from a branch of it. Known once it has begun."""
        return self._interpreter.text.is_branch_of(core._interpreter.text)

    @property
    def root_seed(self) -> int:
        """The run's."""
        return self.session.settings.root_seed

    @property
    def is_idle(self) -> bool:
        """Whether all that was appended has run or failed."""
        return self._interpreter.is_idle

    @property
    def error(self) -> BaseException | None:
        """What ended this state."""
        return self._interpreter.error

    @property
    def trace(self) -> NodeTrace | None:
        """Its lines in the run's trace; None where nobody traces."""
        return self._interpreter.trace

    @property
    def kv_report(self) -> KVReport:
        """Of all calls since the root or the fork."""
        return self._interpreter.calls.kv_report

    @property
    def text(self) -> str:
        return self._interpreter.text.text

    @property
    def text_since_fork(self) -> str:
        return self._interpreter.text.text_since_fork

    @property
    def messages(self) -> list[dict[str, str]]:
        return self._interpreter.text.messages

    @property
    def token_ids(self) -> list[int]:
        return self._interpreter.text.token_ids
