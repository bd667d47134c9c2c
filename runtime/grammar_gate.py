"""Holds requests back until their grammars are compiled; the others go on meanwhile.

A compilation runs in a thread of its own and has limited time. xgrammar can't be interrupted, so
one that takes too long keeps its thread. Few threads are allowed; where such ones have taken all,
new grammars are refused until one ends.
Knows nothing of schedulers, tensors or what a constraint does.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.messages import Abort, AddRequest, Fork, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

COMPILE_TIMEOUT_S = 30.0
MAX_THREADS = 2
Key = tuple[GrammarSource | None, ThinkParams | None]


class Preparer(Protocol):
    """What the gate asks of `constraints.Constraints`."""

    def is_prepared(self, sampling: SamplingParams) -> bool: ...
    def prepare(self, sampling: SamplingParams) -> None: ...
    def hold(self, sampling: SamplingParams) -> None: ...
    def let_go(self, sampling: SamplingParams) -> None: ...


@dataclasses.dataclass(slots=True)
class _Job:
    """One preparation, for all requests that wait for it."""

    sampling: SamplingParams
    deadline: float = 0.0
    thread: threading.Thread | None = None
    error: str | None = None
    has_ended: bool = False

    @property
    def is_running(self) -> bool:
        """Not settled yet."""
        return not self.has_ended and self.error is None

    def run(self, preparer: Preparer) -> None:
        try:
            preparer.prepare(self.sampling)
        except ValueError as error:
            self.error = str(error)
        except Exception as error:  # a thread's errors reach nobody else
            self.error = f"the grammar could not be prepared: {error!r:.300}"
        self.has_ended = True


@dataclasses.dataclass(slots=True)
class Passed:
    """A message that may go on, and those of its requests that may not, with the reason."""

    message: AddRequest | Fork
    refused: list[tuple[AddRequest, str]]


class GrammarGate:
    """Messages in, messages out, in order where nothing has to be waited for."""

    def __init__(
        self, preparer: Preparer, max_waiting: int, timeout_s: float = COMPILE_TIMEOUT_S
    ) -> None:
        self._preparer = preparer
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._waiting: deque[AddRequest | Fork] = deque()
        self._jobs: dict[Key, _Job] = {}
        self._stuck: list[threading.Thread] = []
        self._users: dict[str, tuple[SamplingParams, int]] = {}  # request id -> samples running

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, message: AddRequest | Fork) -> Passed | None:
        """The message if it may go on at once; None: `pass_on` will give it later."""
        samplings = [request.sampling for request in _requests(message)]
        if all(not s.is_constrained or self._preparer.is_prepared(s) for s in samplings):
            return self._let_through(message)
        if len(self._waiting) >= self._max_waiting:
            error = f"{self._max_waiting} requests wait for grammars already; try again later"
            return Passed(message, [(request, error) for request in _requests(message)])
        for sampling in samplings:
            self._want(sampling)
        self._start_threads()
        self._waiting.append(message)
        return None

    def pass_on(self) -> list[Passed]:
        """The messages whose grammars have been settled since the last call."""
        if not self._waiting:
            return []
        self._look_after_jobs()
        waiting, self._waiting = self._waiting, deque()
        passed = []
        for message in waiting:
            if self._is_settled(message):
                passed.append(self._let_through(message))
            else:
                self._waiting.append(message)
        wanted = {_key(r.sampling) for message in self._waiting for r in _requests(message)}
        self._jobs = {key: job for key, job in self._jobs.items() if key in wanted}
        return passed

    def wait(self, timeout_s: float) -> None:
        """Until a compilation ends, but not for long."""
        running = [j.thread for j in self._jobs.values() if j.thread is not None and j.is_running]
        if running:
            running[0].join(timeout_s)

    def abort(self, message: Abort) -> list[AddRequest]:
        """Take out what the message aborts; the requests that were waiting here."""
        ids, groups = set(message.request_ids), set(message.group_ids) - {""}
        aborted: list[AddRequest] = []
        kept: deque[AddRequest | Fork] = deque()
        for held in self._waiting:
            gone = [r for r in _requests(held) if r.request_id in ids or r.group_id in groups]
            aborted += gone
            rest = _without(held, gone)
            if rest is not None:
                kept.append(rest)
        self._waiting = kept
        return aborted

    def note_outputs(self, outputs: Iterable[TokenOutput]) -> None:
        """Requests that have ended need their grammars no more."""
        if not self._users:
            return
        for output in outputs:
            if output.is_final and output.request_id in self._users:
                sampling, num_running = self._users[output.request_id]
                self._users[output.request_id] = (sampling, num_running - 1)
                if num_running == 1:
                    del self._users[output.request_id]
                    self._preparer.let_go(sampling)

    def _want(self, sampling: SamplingParams) -> None:
        is_ready = not sampling.is_constrained or self._preparer.is_prepared(sampling)
        if not is_ready and _key(sampling) not in self._jobs:
            self._jobs[_key(sampling)] = _Job(sampling)

    def _start_threads(self) -> None:
        running = [j for j in self._jobs.values() if j.thread is not None and j.is_running]
        queued = [j for j in self._jobs.values() if j.thread is None and j.error is None]
        for job in queued[: max(0, MAX_THREADS - len(running) - len(self._stuck))]:
            job.thread = threading.Thread(
                target=job.run, args=(self._preparer,), name="zipage-grammar", daemon=True
            )
            job.deadline = time.monotonic() + self._timeout_s
            job.thread.start()

    def _look_after_jobs(self) -> None:
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        for job in self._jobs.values():
            if job.thread is not None and job.is_running and time.monotonic() > job.deadline:
                job.error = f"the grammar took over {self._timeout_s:g} s to compile; simplify it"
                self._stuck.append(job.thread)
            if job.thread is None and len(self._stuck) >= MAX_THREADS:
                job.error = "other grammars take too long to compile; try again later"
        self._start_threads()

    def _is_settled(self, message: AddRequest | Fork) -> bool:
        jobs = (self._jobs.get(_key(request.sampling)) for request in _requests(message))
        return all(job is None or not job.is_running for job in jobs)

    def _let_through(self, message: AddRequest | Fork) -> Passed:
        refused = []
        for request in _requests(message):
            job = self._jobs.get(_key(request.sampling))
            if job is not None and job.error is not None:
                refused.append((request, job.error))
            elif request.sampling.is_constrained:
                self._hold(request)
        return Passed(message, refused)

    def _hold(self, request: AddRequest) -> None:
        self._preparer.hold(request.sampling)
        if request.request_id in self._users:  # a second one under this id will be refused
            self._preparer.let_go(request.sampling)
            return
        self._users[request.request_id] = (request.sampling, request.sampling.n)


def _key(sampling: SamplingParams) -> Key:
    return (sampling.grammar, sampling.think)


def _requests(message: AddRequest | Fork) -> Sequence[AddRequest]:
    return [message] if isinstance(message, AddRequest) else message.children


def _without(message: AddRequest | Fork, gone: Sequence[AddRequest]) -> AddRequest | Fork | None:
    if isinstance(message, AddRequest):
        return None if gone else message
    children = [child for child in message.children if child not in gone]
    return Fork(parent_id=message.parent_id, children=children) if children else None
