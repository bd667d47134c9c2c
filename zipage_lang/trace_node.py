"""One state's lines in a trace: its text, calls, branches and end.

Knows nothing of files, of runs' beginnings, or of how states run.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.trace_calls import CallTrace, reason_of
from zipage_lang.trace_events import (
    Budget,
    CallKind,
    CallStart,
    Cancel,
    Event,
    Failure,
    Fork,
    Join,
    Note,
    Role,
    Scratch,
    Splice,
    Text,
)
from zipage_lang.trace_values import kv_fields, now, sampling_fields


class Run(Protocol):
    """The run that a state belongs to."""

    run_id: str

    def new_node(self) -> "NodeTrace": ...

    def put(self, event: Event) -> None: ...


class Traceable(Protocol):
    """A state that may have a place in the trace."""

    @property
    def trace(self) -> "NodeTrace | None": ...


class Traced(Protocol):
    """A state that may be given its place in the trace."""

    trace: "NodeTrace | None"
    error: BaseException | None
    fork_kind: str


class NodeTrace:
    """One state's lines. `core.trace` is this, or None when nobody traces."""

    def __init__(self, run: Run, node_id: int) -> None:
        self.node_id = node_id
        self._run = run
        self._calls: dict[int, CallTrace] = {}
        self._has_failed = False
        self._scratch_of: NodeTrace | None = None

    def emit(self, kind: str, **data: Any) -> None:
        """Write a line of another kind: "budget" has its own, all else is a note.

        `data` may hold what JSON can; anything else is written as its repr.
        """
        if kind == "budget":
            self._put(Budget, data=data)
        else:
            self._put(Note, kind=kind, data=data)

    def item(self, item: Any) -> None:
        """The author's text or a role is being appended; the other items have their own calls."""
        match type(item).__name__:
            case "Text" | "Keep":
                self._put(Text, text=item.text)
            case "RoleBegin" | "RoleEnd" as name:
                self._put(Role, role=item.role, opens=name == "RoleBegin")

    def start_gen(self, call: Any, num_prompt_tokens: int) -> None:
        """A GenCall goes to the backend."""
        self._start(
            call,
            num_prompt_tokens,
            kind="gen",
            name=call.node.name or "",
            seed=call.sampling.seed,
            sampling=sampling_fields(call.sampling),
        )

    def start_select(self, call: Any, num_prompt_tokens: int, kind: CallKind = "select") -> None:
        """The choices of a SelectCall (or of one that only scores) go to the backend."""
        self._start(
            call,
            num_prompt_tokens,
            kind=kind,
            name=call.node.name or "",
            choices=list(call.node.choices),
        )

    def saw(self, call: Any, output: Any) -> None:
        """One RequestOutput of the call, as it comes."""
        live = self._calls.get(call.variable.call_index)
        if live is not None:
            live.saw(output)

    def end_call(self, call: Any, scored: Any = None) -> None:
        """The call is done; `scored` is the SelectOutput of a select."""
        live = self._calls.pop(call.variable.call_index, None)
        if live is not None:
            live.end("ok", scored=scored)

    def fail(self, item: Any, error: BaseException) -> None:
        """`item` fails with `error`: its call ends, and so does the state, the first time."""
        is_cancelled = isinstance(error, asyncio.CancelledError) or "Cancel" in type(error).__name__
        live = self._calls.pop(getattr(getattr(item, "variable", None), "call_index", -1), None)
        if live is not None:
            live.end("cancelled" if is_cancelled else "error", error=error)
        if not self._has_failed:
            self._has_failed = True
            self._put(Cancel, reason=reason_of(error)) if is_cancelled else self._put(
                Failure, error=reason_of(error)
            )
        self._fork_of_failed(item)

    def fork(self, branches: Sequence[Traced], kv: KVParams | None = None) -> None:
        """`branches` go on from here; each gets its own `trace`."""
        why = branches[0].fork_kind
        nodes = [self._run.new_node() for _ in branches]
        for branch, node in zip(branches, nodes, strict=True):
            branch.trace = node
        children = [node.node_id for node in nodes]
        self._put(Fork, children=children, why=why, kv=kv_fields(kv) if kv is not None else {})
        if why == "scratch":
            self._put(Scratch, begins=True, child=children[0])
            nodes[0]._scratch_of = self
        for branch, node in zip(branches, nodes, strict=True):
            if branch.error is not None:  # given up before its fork was reached
                node.fail(None, branch.error)

    def join(self, branches: Sequence[Traceable], mode: str) -> None:
        """What `branches` made is being brought here."""
        children = [branch.trace.node_id for branch in branches if branch.trace is not None]
        self._put(Join, children=children, mode=mode)

    def splice(self, branch: Traceable) -> None:
        """What `branch` said is being appended."""
        if branch.trace is not None:
            self._put(Splice, child=branch.trace.node_id)

    def cancel(self, reason: str) -> None:
        """This state is given up: a loser of a vote, a budget that ran out."""
        self._has_failed = True
        self._put(Cancel, reason=reason)

    def released(self) -> None:
        """Nobody goes on from this state: the end of a scratch frame."""
        if self._scratch_of is not None:
            self._scratch_of._put(Scratch, begins=False, child=self.node_id)

    def _fork_of_failed(self, item: Any) -> None:
        """Branches that will never begin are seen all the same."""
        branches = getattr(item, "branches", None)
        if branches:
            self.fork(branches)
            for branch in branches:
                branch.trace.cancel("never began: the state it forks from had ended")

    def _start(self, call: Any, num_prompt_tokens: int, **fields: Any) -> None:
        index, kv = call.variable.call_index, kv_fields(call.kv)
        marks = getattr(call.node, "thoughts", None)  # a select's node has none
        self._calls[index] = CallTrace(self._put, index, marks)
        self._put(CallStart, call=index, prompt_tokens=num_prompt_tokens, kv=kv, **fields)

    def _put(self, make: type[Event], **fields: Any) -> None:
        self._run.put(make(t=now(), run=self._run.run_id, node=self.node_id, **fields))
