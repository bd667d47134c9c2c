"""Runs one state's expressions in order on the event loop, without a thread of its own.

A state is a queue. Whatever is appended waits there, and one coroutine takes it off piece by piece;
it ends when the queue is empty. A branch is another state whose queue starts to move when its
parent reaches the fork.
Knows nothing of blocking readers, decorators or how requests are computed.
"""

import asyncio
import dataclasses
from collections import deque
from concurrent.futures import Future
from typing import Any

from zipage_lang.calls import Endpoint, generate, score_choices, settle_output
from zipage_lang.chat import ChatCursor
from zipage_lang.errors import RunCancelledError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.ir import RoleBegin, RoleEnd, Text
from zipage_lang.loops import done_future, new_future
from zipage_lang.plan import GenCall, Planned, Planner, SelectCall
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.session import Session, merge_kv
from zipage_lang.stream import Delta, DeltaLog
from zipage_lang.transcript import ForkPoint, Transcript
from zipage_lang.variables import Variable, Variables


@dataclasses.dataclass(frozen=True, eq=False)
class Fork:
    """The place in the parent's queue where branches take over a copy of it."""

    branches: "list[StateCore]"


@dataclasses.dataclass(frozen=True, eq=False)
class Splice:
    """The place where what a finished branch said is appended."""

    branch: "StateCore"


@dataclasses.dataclass(frozen=True, eq=False)
class Barrier:
    """Done when all before it in the queue is, failed or not."""

    reached: "Future[None]" = dataclasses.field(default_factory=new_future)


Item = Planned | Fork | Splice | Barrier


class StateCore:
    """One state or branch. Append from any one thread; all else happens on the loop."""

    def __init__(
        self, session: Session, planner: Planner, variables: Variables | None = None
    ) -> None:
        self.session = session
        self.variables = variables or Variables()
        self.deltas = DeltaLog()
        self.error: BaseException | None = None  # what ended this state; nothing runs after it
        self._planner = planner
        self._endpoint = Endpoint(session.settings.backend, session.group_id)
        self._queue: deque[Item] = deque()
        self._is_running = False
        self._has_started = False
        self._transcript = Transcript(session.settings.backend)
        self._chat = ChatCursor(session.settings.template)
        self._forked_at = ForkPoint(0, 0)
        self._chat_at_fork = self._chat

    @classmethod
    def root(cls, session: Session) -> "StateCore":
        """The state that a run begins with."""
        core = cls(session, Planner(session.settings, (), session.settings.kv))
        core._has_started = True
        return core

    # From the program's side: all of this returns at once.

    def append(self, value: Any) -> None:
        """Queue a string or expression. Raises ValueError for what can't be, and queues nothing."""
        planned = self._planner.plan(value)
        for item in planned:
            if isinstance(item, GenCall | SelectCall) and item.variable.name:
                self.variables.add(item.variable)
        self._enqueue(*planned)

    def assign(self, name: str, value: Any, meta: Any = None) -> None:
        """Store a plain value under `name`, at once."""
        variable = Variable(name)
        variable.fill(value, meta)
        self.variables.add(variable)

    def fork(self, num_branches: int, kv: KVParams | None) -> "list[StateCore]":
        """Branches that go on from here, once everything queued so far is done."""
        branches = [
            StateCore(self.session, planner, Variables(self.variables.snapshot()))
            for planner in self._planner.fork(num_branches, kv)
        ]
        self._enqueue(Fork(branches))
        return branches

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
    def messages(self) -> list[dict[str, str]]:
        return [dict(message) for message in self._chat.messages]

    @property
    def token_ids(self) -> list[int]:
        return self._prompt()

    def _enqueue(self, *items: Item) -> None:
        self._queue.extend(items)
        self.session.bridge.call(self._kick)

    # Running: on the loop only.

    def _kick(self) -> None:
        if self._has_started and not self._is_running and self._queue:
            self._is_running = True
            self.session.spawn(self._drain(), self._stop)

    async def _drain(self) -> None:
        while self._queue:
            await self._run_or_fail(self._queue.popleft())

    def _stop(self) -> None:
        """The drain is over; had it been cancelled before its first step, what waits fails now."""
        self._is_running = False
        self._kick()

    async def _run_or_fail(self, item: Item) -> None:
        self.error = self.error or self.session.cancelled_by
        try:
            if isinstance(item, Barrier):
                item.reached.set_result(None)
            elif self.error is not None:
                self._fail(item, self.error)
            else:
                await self._run(item)
        except asyncio.CancelledError:
            self.error = self.session.cancelled_by or RunCancelledError()
            self._fail(item, self.error)
            self._go_on_after_cancellation()
        except Exception as error:  # any: it is raised again where the value is read
            self.error = error
            self._fail(item, error)

    def _go_on_after_cancellation(self) -> None:
        """The rest of the queue must still be failed, so that no reader waits for ever."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()

    async def _run(self, item: Item) -> None:
        match item:
            case Text(text):
                self._chat.write(text, self._transcript)
            case RoleBegin(role):
                self._chat.begin(role, self._transcript)
            case RoleEnd():
                self._chat.end(self._transcript)
            case GenCall():
                await self._run_gen(item)
            case SelectCall():
                await self._run_select(item)
            case Fork(branches):
                self._run_fork(branches)
            case Splice(branch):
                self._run_splice(branch)

    def _fail(self, item: Item, error: BaseException) -> None:
        match item:
            case GenCall() | SelectCall():
                item.variable.fail(error)
            case Fork(branches):
                for branch in branches:
                    branch.error = error
                    branch._begin()

    async def _run_gen(self, call: GenCall) -> None:
        prompt = self._prompt()
        outputs = await generate(
            self._endpoint,
            prompt,
            call.sampling,
            self._protecting(call.kv),
            lambda output, num_new: self._publish(call, output, num_new),
        )
        first = outputs[0]
        kept, unfinished = settle_output(self._endpoint.backend, first, call.sampling)
        self._transcript.add_generated(kept, first.text, unfinished)
        self._chat.note(first.text)
        if call.sampling.n == 1:
            call.variable.fill(first.text, first)
        else:
            call.variable.fill([output.text for output in outputs], outputs)

    def _publish(self, call: GenCall, output: RequestOutput, num_new_tokens: int) -> None:
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
        scored = await score_choices(self._endpoint, prompt, call.node, self._protecting(call.kv))
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

    def _run_fork(self, branches: "list[StateCore]") -> None:
        self._chat.before_reply(self._transcript)
        for branch in branches:
            branch._transcript = self._transcript.copy()
            branch._forked_at = branch._transcript.fork_point()
            branch._chat = self._chat.copy()
            branch._chat_at_fork = self._chat.copy()
            branch._begin()

    def _run_splice(self, branch: "StateCore") -> None:
        self._chat.before_reply(self._transcript)
        branch._chat.before_reply(branch._transcript)
        self._transcript.append_from(branch._transcript, branch._forked_at)
        self._chat.append_from(branch._chat, branch._chat_at_fork)

    def _begin(self) -> None:
        self._has_started = True
        self._kick()

    def _prompt(self) -> list[int]:
        self._chat.before_reply(self._transcript)
        return self._transcript.settle()

    def _protecting(self, kv: KVParams) -> KVParams:
        """`kv` with what the author wrote before the first generated token protected."""
        return merge_kv(KVParams(protected_len=self._transcript.authored_len), kv)
