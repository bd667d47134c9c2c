"""Runs one state's expressions in order on the event loop, without a thread of its own.

A state is a queue. Whatever is appended waits there, and one coroutine takes it off piece by piece;
it ends when the queue is empty. A branch is another state whose queue starts to move when its
parent reaches the fork.
Knows nothing of blocking readers, decorators or how requests are computed.
"""

import asyncio
import dataclasses
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any, cast

from zipage_lang.backend import Backend, Limited
from zipage_lang.budgets import Account, Budget
from zipage_lang.calls import (
    Endpoint,
    Publish,
    generate,
    ignore,
    score_choices,
    settle_answer,
    settle_output,
    with_turn_end,
)
from zipage_lang.chat import ChatCursor
from zipage_lang.door import open_door
from zipage_lang.errors import RunCancelledError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.ir import Keep, RoleBegin, RoleEnd, ScopeBegin, Score, Text
from zipage_lang.kv_report import KVReport, report_of
from zipage_lang.loops import done_future, new_future
from zipage_lang.plan import Call, GenCall, Planned, Planner, ScopeClose, SelectCall
from zipage_lang.replies import Reading, fill_variables, read_output
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.session import Session, merge_kv
from zipage_lang.stream import Delta, DeltaLog
from zipage_lang.trace_events import CallKind
from zipage_lang.trace_node import NodeTrace
from zipage_lang.transcript import ForkPoint, Transcript
from zipage_lang.variables import Variable, Variables


@dataclasses.dataclass(frozen=True, eq=False)
class Fork:
    """The place in the parent's queue where branches take over a copy of it."""

    branches: "list[StateCore]"


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where a branch's text left that of a state above it."""

    core: "weakref.ref[StateCore]"
    point: ForkPoint
    chat: ChatCursor


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

    branch: "StateCore"


@dataclasses.dataclass(frozen=True, eq=False)
class Barrier:
    """Done when all before it in the queue is, failed or not."""

    reached: "Future[None]" = dataclasses.field(default_factory=new_future)


Item = Planned | Fork | Splice | SetAccount | Release | Barrier


class StateCore:
    """One state or branch. Append from any one thread; all else happens on the loop."""

    def __init__(
        self, session: Session, planner: Planner, variables: Variables | None = None
    ) -> None:
        self.session = session
        self.variables = variables or Variables()
        self.deltas = DeltaLog()
        self.error: BaseException | None = None  # what ended this state; nothing runs after it
        self.trace: NodeTrace | None = None  # None: nobody traces this run
        self.fork_kind = "root"
        self._planner = planner
        self.door = open_door(session)
        self._endpoint = Endpoint(cast("Backend", self.door), session.group_id)
        self._queue: deque[Item] = deque()
        self._is_running = False  # a task works on the queue
        self._is_working = False  # and is in the middle of an item
        self._has_started = False
        self._task: asyncio.Task[None] | None = None
        self._children: weakref.WeakSet[StateCore] | None = None
        self._account: Account | None = None  # as of what is appended next
        self._place = 0
        self._transcript = Transcript(session.settings.backend)
        self._chat = ChatCursor(session.settings.template)
        self._forked_at = ForkPoint(0, 0)
        self._origins: tuple[Origin, ...] = ()  # where it was forked, the root's fork first
        self._scopes: dict[str, int] = {}  # open var_scopes: where their text begins
        self.kv_report = KVReport()  # of all calls since the root or the fork

    @classmethod
    def root(cls, session: Session) -> "StateCore":
        """The state that a run begins with."""
        core = cls(session, Planner(session.settings, (), session.settings.kv))
        core._has_started = True
        if session.settings.budget is not None:
            session.bridge.call(core.enter(session.settings.budget).start_clock)
        core.trace = session.trace.new_node() if session.trace is not None else None
        return core

    # From the program's side: all of this returns at once.

    def append(self, value: Any) -> None:
        """Queue a string or expression. Raises ValueError for what can't be, and queues nothing."""
        planned = self._planner.plan(value)
        for item in planned:
            for variable in item.variables if isinstance(item, Call) else ():
                if variable.name:
                    self.variables.add(variable)
        self._enqueue(*planned)

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
            StateCore(self.session, planner, Variables(self.variables.snapshot()))
            for planner in self._planner.fork(num_branches, kv)
        ]
        for place, branch in enumerate(branches):
            branch._place, branch.fork_kind = place, why
            branch._account = self._account if budget is None else Account(budget, self._account)
            branch.door.account = branch._account
        self._children = self._children or weakref.WeakSet()
        self._children.update(branches)
        self._enqueue(Fork(branches))
        return branches

    def enter(self, budget: Budget) -> Account:
        """Charge what is appended from now on to `budget`, until `leave`."""
        self._account = Account(budget, self._account)
        self._enqueue(SetAccount(self._account))
        return self._account

    def leave(self, account: Account) -> None:
        """End what `enter` began; the innermost first."""
        assert account is self._account, "budgets are left in the order they were entered"
        self._account = account.outer
        self._enqueue(SetAccount(self._account))

    def cancel(self, reason: str | None = None) -> None:
        """Give this state and all its branches up: their requests are aborted at once."""
        error = RunCancelledError(reason)
        self.session.bridge.call(lambda: self._cancel(error))

    @property
    def account(self) -> Account | None:
        """What is appended next is charged to this."""
        return self._account

    @property
    def place(self) -> int:
        """Which branch of its fork this is."""
        return self._place

    @property
    def root_seed(self) -> int:
        """The run's."""
        return self.session.settings.root_seed

    @property
    def is_idle(self) -> bool:
        """Whether all that was appended has run or failed."""
        return not self._queue and not self._is_working

    def is_branch_of(self, core: "StateCore") -> bool:
        """Whether it was forked from `core`, or from a branch of it. Known once it has begun."""
        return any(origin.core() is core for origin in self._origins)

    def release(self) -> None:
        """Let the engine drop what it holds for this state, once all that is queued has run."""
        self._enqueue(Release())

    def splice(self, branch: "StateCore") -> None:
        """Append what `branch`, which must be drained, said since its fork."""
        self._planner.open_role = branch._planner.open_role
        self._enqueue(Splice(branch))

    def barrier(self) -> "Future[None]":
        """Done when all that is queued now has run or failed."""
        if not self._queue and not self._is_running and self.session.bridge.loop.is_closed():
            return done_future(None)  # all was done before the engine was closed
        barrier = Barrier()
        self._enqueue(barrier)
        return barrier.reached

    # What is there; complete once a barrier was reached.

    @property
    def text(self) -> str:
        self._chat.before_reply(self._transcript)
        return self._transcript.text

    @property
    def text_since_fork(self) -> str:
        return self.text[self._forked_at.num_characters :]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [dict(message) for message in self._chat.messages]

    @property
    def token_ids(self) -> list[int]:
        backend = self.session.settings.backend
        if isinstance(backend, Limited):
            backend.check_token_ids()
        return self._prompt()

    def _enqueue(self, *items: Item) -> None:
        self._queue.extend(items)
        self.session.bridge.call(self._kick)

    # Running: on the loop only.

    def _kick(self) -> None:
        if self._has_started and not self._is_running and self._queue:
            self._is_running = True
            self._task = self.session.spawn(self._drain(), self._stop)

    async def _drain(self) -> None:
        while self._queue:
            await self._run_or_fail(self._queue.popleft())

    def _stop(self) -> None:
        """The drain is over; had it been cancelled before its first step, what waits fails now."""
        self._is_running = False
        self._task = None
        self._kick()

    def _cancel(self, error: RunCancelledError) -> None:
        for child in list(self._children or ()):
            child._cancel(error)
        if self.trace is not None and self.error is None:
            self.trace.cancel(error.reason or "cancelled")
        self.error = self.error or error
        self.door.is_cancelled = True
        self.door.release()
        if self._task is not None:
            self._task.cancel()
        self._begin()  # before its fork is reached: what waits fails now

    async def _run_or_fail(self, item: Item) -> None:
        self.error = self.error or self.session.cancelled_by
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
            self.error = self.error or self.session.cancelled_by or RunCancelledError()
            self._fail(item, self.error)
            self._go_on_after_cancellation()
        except Exception as error:  # any: it is raised again where the value is read
            self.error = error
            self._fail(item, error)
        finally:
            self._is_working = False

    def _go_on_after_cancellation(self) -> None:
        """The rest of the queue must still be failed, so that no reader waits for ever."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()

    async def _run(self, item: Item) -> None:
        if self.trace is not None:
            self.trace.item(item)
        match item:
            case Text(text):
                self._chat.write(text, self._transcript)
            case Keep(text):
                self._run_keep(text)
            case ScopeBegin(name):
                self._scopes[name] = len(self.text)
            case ScopeClose(variable):
                variable.fill(self.text[self._scopes.pop(variable.name) :], None)
            case RoleBegin(role):
                self._chat.begin(role, self._transcript)
            case RoleEnd():
                self._chat.end(self._transcript)
            case GenCall() | SelectCall() if not self._may_begin(item):
                pass
            case GenCall():
                self.door.has_stopped_call = False
                await self._run_gen(item)
                if self.door.has_stopped_call:
                    self._trace_stop(item)
            case SelectCall():
                await self._run_select(item)
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
                    branch._begin()

    def _may_begin(self, call: GenCall | SelectCall) -> bool:
        """Whether a budget is left for the call; where none is, it ends here with nothing."""
        self.door.is_generating = isinstance(call, GenCall)
        account = self.door.account
        if account is None or account.take_call():
            return True
        sampling = call.sampling if isinstance(call, GenCall) else SamplingParams()
        outputs = self.door.refused(account.reason or "calls", sampling)
        _fill_with_nothing(call, outputs)
        self._trace_stop(call)
        return False

    def _trace_stop(self, call: GenCall | SelectCall) -> None:
        """A budget ended the call, or kept it from beginning."""
        if self.trace is not None:
            reason, index = self.door.stop_reason, call.variable.call_index
            self.trace.emit("budget", reason=reason, call=index)

    async def _run_gen(self, call: GenCall) -> None:
        prompt = self._prompt()
        sampling = with_turn_end(self._endpoint.backend, call.sampling, self._chat.turn_end)
        if self.trace is not None:
            self.trace.start_gen(call, len(prompt))
        outputs = await generate(
            self._endpoint,
            prompt,
            sampling,
            self._protecting(call.kv),
            lambda output, num_new: self._publish(call, output, num_new),
            call.node.stop_pattern,
        )
        if self.trace is not None:
            self.trace.end_call(call)
        self.kv_report = self.kv_report.and_then(report_of([output.kv for output in outputs]))
        is_watched = sampling.think is not None
        readings = [read_output(call.node, output, is_watched=is_watched) for output in outputs]
        self._go_on_from(call, sampling, outputs[0], readings[0])
        fill_variables(call, readings, outputs)

    def _go_on_from(
        self, call: GenCall, sampling: SamplingParams, output: RequestOutput, reading: Reading
    ) -> None:
        """Append what stays of a generation."""
        backend, thoughts = self._endpoint.backend, call.node.thoughts
        if thoughts is not None and reading.text != output.text:
            self._transcript.cut_end(thoughts.begin, self._forked_at.num_tokens)
            kept, unfinished = settle_answer(backend, output, sampling, reading.text)
        else:
            kept, unfinished = settle_output(backend, output, sampling, reading.text)
        self._transcript.add_generated(kept, reading.text, unfinished)
        self._chat.note(reading.text)

    def _publish(self, call: GenCall, output: RequestOutput, num_new_tokens: int) -> None:
        if self.trace is not None:
            self.trace.saw(call, output)
        delta = Delta(
            name=call.node.name,
            text=output.text_delta,
            num_tokens=num_new_tokens,
            call_index=call.variable.call_index,
            sample_index=output.sample_index,
        )
        self.deltas.publish(delta)

    async def _run_select(self, call: SelectCall) -> None:
        prompt = self._prompt()
        if self.trace is not None:
            kind: CallKind = "score" if isinstance(call.node, Score) else "select"
            self.trace.start_select(call, len(prompt), kind)
        scored = await score_choices(
            self._endpoint, prompt, call.node, self._protecting(call.kv), self._watch(call)
        )
        if self.trace is not None:
            self.trace.end_call(call, scored)
        self.kv_report = self.kv_report.and_then(report_of([scored.kv]))
        if isinstance(call.node, Score):
            call.variable.fill(scored, scored)
            return
        self._transcript.add_chosen(scored.token_ids[scored.index], scored.choice)
        self._chat.note(scored.choice)
        variable = call.variable
        self.deltas.publish(
            Delta(
                name=variable.name,
                text=scored.choice,
                num_tokens=len(scored.token_ids[scored.index]),
                call_index=variable.call_index,
            )
        )
        variable.fill(scored.choice, scored)

    def _watch(self, call: SelectCall) -> Publish:
        """What sees the outputs of scored choices: the trace, or nobody."""
        trace = self.trace
        if trace is None:
            return ignore
        return lambda output, num_new_tokens: trace.saw(call, output)

    def _run_keep(self, text: str) -> None:
        self._chat.before_reply(self._transcript)
        self._chat.write(text, self._transcript)
        self._transcript.keep()

    def _run_fork(self, branches: "list[StateCore]") -> None:
        if self.trace is not None:
            self.trace.fork(branches)
        self._chat.before_reply(self._transcript)
        for branch in branches:
            branch._transcript = self._transcript.copy()
            branch._forked_at = branch._transcript.fork_point()
            branch._chat = self._chat.copy()
            here = Origin(weakref.ref(self), branch._forked_at, self._chat.copy())
            branch._origins = (*self._origins, here)
        self._share_state(branches)
        for branch in branches:
            branch._begin()

    def _share_state(self, branches: "list[StateCore]") -> None:
        """Several branches start from one state in the engine; a single one needs none."""
        token_ids = self._transcript.settle()
        lineage = self.door.lineage
        if lineage is None or len(branches) < 2 or not token_ids:
            return
        fork = lineage.fork_state(self.session.spawn, token_ids, len(branches))
        for branch in branches:
            if branch.door.lineage is not None:
                branch.door.lineage.start_at(fork)
            if branch.door.is_cancelled:
                branch.door.release()

    def _run_splice(self, branch: "StateCore") -> None:
        if self.trace is not None:
            self.trace.splice(branch)
        self._chat.before_reply(self._transcript)
        branch._chat.before_reply(branch._transcript)
        origin = branch._origin_in(self)
        is_unchanged = len(self._transcript.settle()) == origin.point.num_tokens
        self._transcript.append_from(branch._transcript, origin.point)
        self._chat.append_from(branch._chat, origin.chat)
        if is_unchanged and self.door.lineage is not None and branch.door.lineage is not None:
            self.door.lineage.take_over(branch.door.lineage)
        branch.door.release()

    def _origin_in(self, core: "StateCore") -> Origin:
        found = [origin for origin in self._origins if origin.core() is core]
        assert found, "only a branch of this state can be appended to it"
        return found[-1]

    def _begin(self) -> None:
        self._has_started = True
        self._kick()

    def _prompt(self) -> list[int]:
        self._chat.before_reply(self._transcript)
        return self._transcript.settle()

    def _protecting(self, kv: KVParams) -> KVParams:
        """`kv` with what the author wrote before the first generated token protected.

        What is kept is protected whatever `kv` says, and that includes all before it.
        """
        merged = merge_kv(KVParams(protected_len=self._transcript.authored_len), kv)
        kept_len = self._transcript.kept_len
        if not kept_len:
            return merged
        wanted_len = 0 if merged.protect == "none" else merged.protected_len or 0
        return merge_kv(merged, KVParams(protect="prompt", protected_len=max(wanted_len, kept_len)))


def _fill_with_nothing(call: GenCall | SelectCall, outputs: list[RequestOutput]) -> None:
    """What a call leaves that could not begin: no text, or None where the value is no text."""
    is_text = isinstance(call, GenCall) and call.node.type is None
    nothing = "" if is_text else None
    is_one = len(outputs) == 1
    for variable in call.variables:
        values = [nothing] * len(outputs)
        variable.fill(values[0] if is_one else values, outputs[0] if is_one else outputs)
