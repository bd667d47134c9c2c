"""Holds requests back until their grammars are compiled; the others go on meanwhile.

Compilations run in few threads (`compile_queue`). What a step costs here does not grow with the
number of requests that wait. Knows nothing of schedulers, tensors or what a constraint does.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from zipage_lang.runtime.compile_queue import CompileQueue, Job
from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.messages import Abort, AddRequest, Fork, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

MAX_JOBS = 256  # grammars of one tenant that may wait to be compiled
GAVE_WAY = "the grammars in use take all the memory that there is for them; try again later"
Key = tuple[GrammarSource | None, ThinkParams | None]


class Preparer(Protocol):
    """What the gate asks of `constraints.Constraints`."""

    def is_prepared(self, sampling: SamplingParams) -> bool: ...
    def prepare(self, sampling: SamplingParams) -> None: ...
    def hold(self, sampling: SamplingParams) -> bool: ...
    def let_go(self, sampling: SamplingParams) -> None: ...


@dataclasses.dataclass(slots=True)
class Passed:
    """A message that may go on, and those of its requests that may not, with the reason."""

    message: AddRequest | Fork
    refused: list[tuple[AddRequest, str]]


@dataclasses.dataclass(slots=True)
class _Held:
    """A message that waits, and the jobs it waits for. `jobs`: of each of its requests, if any."""

    message: AddRequest | Fork
    jobs: dict[Key, Job]
    num_open: int


class GrammarGate:
    """Messages in, messages out, in order where nothing has to be waited for."""

    def __init__(
        self, preparer: Preparer, max_waiting: int, max_waiting_per_tenant: int | None = None
    ) -> None:
        self._preparer = preparer
        self._max_waiting, self._max_per_tenant = max_waiting, max_waiting_per_tenant
        self._queue = CompileQueue(preparer.prepare)
        self._waiting: dict[int, _Held] = {}  # by the order they came in
        self._num_taken = 0
        self._place: dict[str, int] = {}  # request id -> its message in `waiting`
        self._num_of: Counter[str] = Counter()  # tenant -> its requests that wait here
        self._ready: list[int] = []  # waited for what has been aborted since
        self._jobs: dict[Key, Job] = {}
        self._waiters: dict[Key, dict[int, None]] = {}
        self._users: dict[str, tuple[SamplingParams, int]] = {}  # request id -> samples running

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request waits here."""
        return request_id in self._place

    def take(self, message: AddRequest | Fork) -> Passed | None:
        """The message if it may go on at once; None: `pass_on` will give it later."""
        requests = _requests(message)
        wanted = {_key(r.sampling): r for r in requests if self._must_wait(r.sampling)}
        if not wanted:
            return self._let_through(message, {})
        error = self._why_not(requests, wanted)
        if error is not None:
            return Passed(message, [(request, error) for request in requests])
        self._hold_back(message, wanted)
        return None

    def pass_on(self) -> list[Passed]:
        """The messages whose grammars have been settled since the last call."""
        ready, self._ready = [n for n in self._ready if n in self._waiting], []
        for job in self._queue.take_settled():
            key = _key(job.sampling)
            del self._jobs[key]
            for number in self._waiters.pop(key):
                held = self._waiting[number]
                held.num_open -= 1
                if held.num_open == 0:
                    ready.append(number)
        return [self._release(number) for number in sorted(ready)]

    def wait(self, timeout_s: float) -> None:
        """Until a compilation ends, but not for long."""
        self._queue.wait(timeout_s)

    def abort(self, message: Abort) -> list[AddRequest]:
        """Take out what the message aborts; the requests that were waiting here."""
        ids = set(message.request_ids)
        numbers = {self._place[i] for i in message.request_ids if i in self._place}
        groups = set(message.group_ids) - {""}
        if groups:
            numbers |= {
                number
                for number, held in self._waiting.items()
                if any(request.group_id in groups for request in _requests(held.message))
            }
        aborted: list[AddRequest] = []
        for number in sorted(numbers):
            held = self._waiting[number]
            gone = [
                r for r in _requests(held.message) if r.request_id in ids or r.group_id in groups
            ]
            aborted += gone
            self._take_out(number, gone)
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

    def table_sizes(self) -> dict[str, int]:
        """Entries of what is kept for requests, by name."""
        return {
            "gate_waiting": len(self._waiting),
            "gate_places": len(self._place),
            "gate_tenants": len(self._num_of),
            "gate_jobs": len(self._jobs),
            "gate_users": len(self._users),
        }

    def _must_wait(self, sampling: SamplingParams) -> bool:
        return sampling.is_constrained and not self._preparer.is_prepared(sampling)

    def _why_not(self, requests: Sequence[AddRequest], wanted: dict[Key, AddRequest]) -> str | None:
        """Why the requests may not wait here; None where they may."""
        if len(self._place) >= self._max_waiting:
            return f"{len(self._place)} requests wait for grammars already; try again later"
        tenant, most = requests[0].tenant, self._max_per_tenant
        if most is not None and self._num_of[tenant] >= most:
            num_own = self._num_of[tenant]
            return f"{num_own} requests of this tenant wait for grammars already; try again later"
        num_new = sum(key not in self._jobs for key in wanted)
        if num_new and self._queue.num_queued(tenant) + num_new > MAX_JOBS:
            return f"{MAX_JOBS} grammars wait to be compiled already; try again later"
        return None

    def _hold_back(self, message: AddRequest | Fork, wanted: dict[Key, AddRequest]) -> None:
        self._num_taken += 1
        number = self._num_taken
        for key, request in wanted.items():
            if key not in self._jobs:
                self._jobs[key] = Job(request.sampling, request.tenant)
                self._queue.add(self._jobs[key])
            self._waiters.setdefault(key, {})[number] = None
        jobs = {key: self._jobs[key] for key in wanted}
        self._waiting[number] = _Held(message, jobs, len(jobs))
        for request in _requests(message):
            self._place[request.request_id] = number
            self._num_of[request.tenant] += 1

    def _release(self, number: int) -> Passed:
        held = self._waiting.pop(number)
        self._forget(_requests(held.message))
        return self._let_through(held.message, held.jobs)

    def _take_out(self, number: int, gone: Sequence[AddRequest]) -> None:
        """The message without those requests; jobs that nobody waits for are not begun."""
        held = self._waiting[number]
        self._forget(gone)
        rest = _without(held.message, gone)
        kept = set() if rest is None else {_key(request.sampling) for request in _requests(rest)}
        for key in [key for key in held.jobs if key not in kept]:
            if key in self._waiters and number in self._waiters[key]:
                held.num_open -= 1
                del self._waiters[key][number]
                if not self._waiters[key] and self._queue.withdraw(held.jobs[key]):
                    del self._waiters[key], self._jobs[key]
        if rest is None:
            del self._waiting[number]
            return
        held.message = rest
        if held.num_open == 0:
            self._ready.append(number)

    def _forget(self, requests: Iterable[AddRequest]) -> None:
        for request in requests:
            self._place.pop(request.request_id, None)
            self._num_of[request.tenant] -= 1
            if self._num_of[request.tenant] <= 0:
                del self._num_of[request.tenant]

    def _let_through(self, message: AddRequest | Fork, jobs: dict[Key, Job]) -> Passed:
        refused = []
        for request in _requests(message):
            job = jobs.get(_key(request.sampling))
            if job is not None and job.error is not None:
                refused.append((request, job.error))
            elif request.sampling.is_constrained and not self._hold(request):
                refused.append((request, GAVE_WAY))
        return Passed(message, refused)

    def _hold(self, request: AddRequest) -> bool:
        if not self._preparer.hold(request.sampling):
            return False
        if request.request_id in self._users:  # a second one under this id will be refused
            self._preparer.let_go(request.sampling)
        else:
            self._users[request.request_id] = (request.sampling, request.sampling.n)
        return True


def _key(sampling: SamplingParams) -> Key:
    return (sampling.grammar, sampling.think)


def _requests(message: AddRequest | Fork) -> Sequence[AddRequest]:
    return [message] if isinstance(message, AddRequest) else message.children


def _without(message: AddRequest | Fork, gone: Sequence[AddRequest]) -> AddRequest | Fork | None:
    if isinstance(message, AddRequest):
        return None if gone else message
    children = [child for child in message.children if child not in gone]
    return Fork(parent_id=message.parent_id, children=children) if children else None
