"""A trace file and the runs that write to it.

A run without a trace has None in all these places, so tracing costs it one check each.
Knows nothing of how states run, or of what a page makes of the lines.
"""

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, Self

from zipage_lang.loops import LoopBridge, done_future, new_future
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.trace_calls import reason_of
from zipage_lang.trace_events import SCHEMA_VERSION, Cancel, Event, Note, RunEnd, RunStart
from zipage_lang.trace_node import NodeTrace
from zipage_lang.trace_values import kv_fields, now, sampling_fields, shortened, versions
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


class Trace:
    """A trace file that many runs may write to: `run(trace=Trace("runs.jsonl"))`.

    Lines are appended; close it (or use `with`) when the last run is over. `run(trace="a.jsonl")`
    and the variable ZIPAGE_TRACE do that by themselves.

    Parameters:
        path: the file; its folder must exist.

    Errors: OSError when the file can't be opened. Later a full disk or a file that was closed
    gives one logged warning and breaks no run.

    >>> with zipage.Trace("/dev/null") as trace:
    ...     state = zipage.function(lambda s: s.append("Hi")).run(trace=trace)
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
            versions=versions(),
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
