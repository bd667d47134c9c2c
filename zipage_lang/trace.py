"""Tells the trace file what a run does: one object for the file, the run and each of its states.

A run without a trace has None in all these places, so tracing costs it one check each.
Knows nothing of how states run, or of what a page makes of the lines.
"""

import asyncio
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import os
import platform
import reprlib
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self

from zipage_lang.loops import LoopBridge, done_future, new_future
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.trace_calls import CallTrace, reason_of
from zipage_lang.trace_events import (
    SCHEMA_VERSION,
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
    RunEnd,
    RunStart,
    Scratch,
    Splice,
    Text,
)
from zipage_lang.trace_writer import TraceWriter

ENVIRONMENT = "ZIPAGE_TRACE"
END_WAIT_S = 10.0  # a run that was given up waits so long for its last lines

log = logging.getLogger("zipage.trace")


class Settings(Protocol):
    """What a run's start says of its settings."""

    @property
    def backend(self) -> Any: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def kv(self) -> KVParams: ...

    @property
    def root_seed(self) -> int: ...


class Running(Protocol):
    """A run's session: where its work is waited for."""

    bridge: LoopBridge

    async def drain(self) -> None: ...


class Traced(Protocol):
    """A state that may be given its place in the trace."""

    trace: "NodeTrace | None"
    error: BaseException | None


class Trace:
    """A trace file that many runs may write to: `run(trace=Trace("runs.jsonl"))`.

    Lines are appended; close it (or use `with`) when the last run is over. `run(trace="a.jsonl")`
    and the variable ZIPAGE_TRACE do that by themselves. Raises OSError when the file can't be
    opened; later a full disk gives one logged warning and breaks nothing.

        >>> hello = zipage.function(lambda s: s.__iadd__(zipage.gen("name")))
        >>> with zipage.Trace("/dev/null") as trace: state = hello.run(trace=trace)
    """

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        self.path = os.fspath(path)
        self._writer: TraceWriter | None = TraceWriter(path)
        self._closes_itself = False
        self._num_open = 0
        self._lock = threading.Lock()

    @classmethod
    def of_runs(cls, path: "str | os.PathLike[str]") -> "Trace":
        """A trace that opens with its first run and closes when no run is open."""
        trace = cls.__new__(cls)
        trace.path = os.fspath(path)
        trace._writer = None
        trace._closes_itself = True
        trace._num_open = 0
        trace._lock = threading.Lock()
        return trace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def emit(self, kind: str, **data: Any) -> None:
        """Write a line of your own; the page shows it with its run's events."""
        self.put(Note(t=now(), kind=kind, data=data))

    def flush(self) -> None:
        """Wait until all that was written so far is in the file."""
        if self._writer is not None:
            self._writer.flush().result()

    def close(self) -> None:
        """Write the rest and close the file. What comes later is dropped with one warning."""
        if self._writer is not None:
            self._writer.close()

    def put(self, event: Event) -> None:
        """Queue one event of the schema; returns at once."""
        if self._writer is not None:
            self._writer.put(event)

    def begin_run(
        self,
        run_id: str,
        body: Callable[..., Any],
        arguments: Mapping[str, Any],
        settings: Settings,
    ) -> "RunTrace":
        """Write the run's first line. Raises OSError when the file has to be opened and can't."""
        with self._lock:
            if self._writer is None:
                self._writer = TraceWriter(self.path)
            self._num_open += 1
        start = RunStart(
            t=now(),
            run=run_id,
            schema=SCHEMA_VERSION,
            program=getattr(body, "__name__", type(body).__name__),
            args={name: shortened(value) for name, value in arguments.items()},
            seed=settings.root_seed,
            backend=type(settings.backend).__name__,
            versions=_versions(),
            sampling=sampling_fields(settings.sampling),
            kv=kv_fields(settings.kv),
        )
        self.put(start)
        return RunTrace(self, run_id)

    def end_run(self) -> "Future[None]":
        """One run is over. Done when the file is closed, where that was the last one."""
        with self._lock:
            self._num_open -= 1
            if self._num_open or not self._closes_itself or self._writer is None:
                return done_future(None)
            writer, self._writer = self._writer, None
        return writer.close_soon()


class RunTrace:
    """One run's lines."""

    def __init__(self, trace: Trace, run_id: str) -> None:
        self.run_id = run_id
        self._trace = trace
        self._node_ids = itertools.count()
        self._ending: Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def new_node(self) -> "NodeTrace":
        """The next state; the first one is the run's root."""
        return NodeTrace(self, next(self._node_ids))

    def put(self, event: Event) -> None:
        self._trace.put(event)

    def cancel(self, error: BaseException) -> None:
        """The whole run was given up."""
        self.put(Cancel(t=now(), run=self.run_id, reason=reason_of(error.__cause__ or error)))

    def end(self, session: Running, body: "Future[Any]") -> "Future[None]":
        """Write the last line once nothing of the run works any more.

        Done when it is written (and the file closed, if nobody else will). `body` has ended.
        """
        if self._ending is None:
            self._ending = new_future()
            if session.bridge.loop.is_closed():
                self._end_now(body)
            else:
                session.bridge.call(lambda: self._spawn(session, self._end_later(session, body)))
        return self._ending

    def end_with(self, session: Running, body: "Future[Any]") -> None:
        """`end` as soon as `body` has ended."""
        body.add_done_callback(lambda _: self.end(session, body))

    def ended(self, session: Running, body: "Future[Any]") -> None:
        """`end`, waited for."""
        try:
            self.end(session, body).result(END_WAIT_S)
        except TimeoutError:
            log.warning("trace file %s: %s still works", self._trace.path, self.run_id)

    async def ended_async(self, session: Running, body: "Future[Any]") -> None:
        """`end`, awaited."""
        await asyncio.wait([asyncio.wrap_future(self.end(session, body))], timeout=END_WAIT_S)

    def _spawn(self, session: Running, work: Coroutine[Any, Any, None]) -> None:
        self._task = session.bridge.loop.create_task(work)

    async def _end_later(self, session: Running, body: "Future[Any]") -> None:
        try:
            await session.drain()
        finally:
            self._end_now(body)

    def _end_now(self, body: "Future[Any]") -> None:
        assert self._ending is not None, f"run {self.run_id} ends before it was asked to"
        error = body.exception() if body.done() else None
        has_value = body.done() and error is None and body.result() is not None
        self.put(
            RunEnd(
                t=now(),
                run=self.run_id,
                error=None if error is None else reason_of(error),
                returned=shortened(body.result()) if has_value else None,
            )
        )
        ending = self._ending
        self._trace.end_run().add_done_callback(lambda _: ending.set_result(None))


class NodeTrace:
    """One state's lines. `core.trace` is this, or None when nobody traces."""

    def __init__(self, run: RunTrace, node_id: int) -> None:
        self.node_id = node_id
        self._run = run
        self._calls: dict[int, CallTrace] = {}
        self._has_failed = False

    def emit(self, kind: str, **data: Any) -> None:
        """Write a line of another kind: "budget" and "scratch" have their own, all else is a note.

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
        for branch in self._fork_of_failed(item):
            branch.fail(None, error)

    def fork(self, branches: Sequence[Traced], why: str = "fork", kv: Any = None) -> None:
        """`branches` go on from here; each gets its own `trace`."""
        nodes = [self._run.new_node() for _ in branches]
        for branch, node in zip(branches, nodes, strict=True):
            branch.trace = node
        children = [node.node_id for node in nodes]
        self._put(Fork, children=children, why=why, kv=kv_fields(kv) if kv is not None else {})
        for branch, node in zip(branches, nodes, strict=True):
            if branch.error is not None:  # given up before its fork was reached
                node.fail(None, branch.error)

    def join(self, branches: Sequence[Traced], mode: str) -> None:
        """What `branches` made is being brought here."""
        children = [branch.trace.node_id for branch in branches if branch.trace is not None]
        self._put(Join, children=children, mode=mode)

    def splice(self, branch: Traced) -> None:
        """What `branch` said is being appended."""
        if branch.trace is not None:
            self._put(Splice, child=branch.trace.node_id)

    def cancel(self, reason: str) -> None:
        """This state is given up: a loser of a vote, a budget that ran out."""
        self._has_failed = True
        self._put(Cancel, reason=reason)

    def scratch(self, *, begins: bool, state: Traced | None = None) -> None:
        """Text that does not stay begins or ends, in `state` where it has one of its own."""
        child = None if state is None or state.trace is None else state.trace.node_id
        self._put(Scratch, begins=begins, child=child)

    def _fork_of_failed(self, item: Any) -> "list[NodeTrace]":
        branches = getattr(item, "branches", None)
        if not branches:
            return []
        self.fork(branches)
        return [branch.trace for branch in branches]

    def _start(self, call: Any, num_prompt_tokens: int, **fields: Any) -> None:
        index, kv = call.variable.call_index, kv_fields(call.kv)
        self._calls[index] = CallTrace(self._put, index)
        self._put(CallStart, call=index, prompt_tokens=num_prompt_tokens, kv=kv, **fields)

    def _put(self, make: type[Event], **fields: Any) -> None:
        self._run.put(make(t=now(), run=self._run.run_id, node=self.node_id, **fields))


def open_trace(given: "str | os.PathLike[str] | Trace | None") -> Trace | None:
    """What `run(trace=...)` means; None asks the variable ZIPAGE_TRACE.

    Raises ValueError for anything but a path or a Trace. A path of the variable that can't be
    opened is logged and not traced, since no program asked for it.
    """
    if given is None:
        return _of_environment()
    if isinstance(given, Trace):
        return given
    if isinstance(given, str | os.PathLike) and os.fspath(given):
        return Trace.of_runs(given)
    raise ValueError(f"trace={given!r} must be a file's path or a zipage.Trace(...)")


def _of_environment() -> Trace | None:
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    try:
        with open(path, "ab"):
            return Trace.of_runs(path)
    except OSError as error:
        log.warning("%s=%s can't be written, so nothing is traced: %s", ENVIRONMENT, path, error)
        return None


_CLOCK_OFFSET_S = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970 by a clock that never goes back within this process."""
    return round(_CLOCK_OFFSET_S + time.perf_counter(), 6)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 10


def shortened(value: Any) -> str:
    """The repr of an argument, a few hundred characters at most."""
    try:
        text = _short.repr(value)
    except Exception as error:  # any: it is the argument's own code
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 500 else f"{text[:240]}...{text[-240:]}"


_DEFAULT_SAMPLING = SamplingParams()


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The fields that say something else than the defaults; the seed has its own place."""
    names = [field.name for field in dataclasses.fields(sampling) if field.name != "seed"]
    values = {name: getattr(sampling, name) for name in names}
    return {n: v for n, v in values.items() if v != getattr(_DEFAULT_SAMPLING, n)}


def kv_fields(kv: KVParams) -> dict[str, Any]:
    """The fields that were asked for."""
    values = {field.name: getattr(kv, field.name) for field in dataclasses.fields(kv)}
    return {name: value for name, value in values.items() if value is not None}


@functools.cache
def _versions() -> dict[str, str]:
    return {
        "zipage-lang": importlib.metadata.version("zipage-lang"),
        "python": platform.python_version(),
    }
