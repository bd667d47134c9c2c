"""Runs compilations in few threads; the tenants that wait take turns, so none fills all the line.

A compilation ends by itself: it is bounded where it is done (`grammar_pool`). What needs no grammar
has a thread of its own and is never behind one that does. Knows nothing of requests.
"""

import dataclasses
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable

from zipage_lang.runtime.sampling_params import SamplingParams

MAX_THREADS = 2  # that compile grammars


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One preparation, for all requests that wait for it."""

    sampling: SamplingParams
    tenant: str
    error: str | None = None


class CompileQueue:
    """Jobs in; settled ones out. All but the jobs themselves runs in the caller's thread."""

    def __init__(self, prepare: Callable[[SamplingParams], None]) -> None:
        """prepare: called in threads; its ValueErrors are the job's."""
        self._prepare = prepare
        self._lines = {is_grammar: _Line() for is_grammar in (True, False)}
        self._settled: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._seen: list[Job] = []  # settled, and found by `wait`

    def num_queued(self, tenant: str) -> int:
        """The tenant's jobs that have not begun."""
        return sum(line.num_queued(tenant) for line in self._lines.values())

    def add(self, job: Job) -> None:
        line = self._line_of(job)
        line.add(job)
        self._start(line)

    def withdraw(self, job: Job) -> bool:
        """Take a job out that has not begun. False where it has."""
        return self._line_of(job).withdraw(job)

    def take_settled(self) -> list[Job]:
        """The jobs that have ended since the last call."""
        settled, self._seen = self._seen, []
        while not self._settled.empty():
            settled.append(self._settled.get())
        for job in settled:
            line = self._line_of(job)
            line.num_running -= 1
            self._start(line)
        return settled

    def wait(self, timeout_s: float) -> None:
        """Until a job has ended, but not for long."""
        if not self._seen:
            try:
                self._seen.append(self._settled.get(timeout=timeout_s))
            except queue.Empty:
                return

    def _line_of(self, job: Job) -> "_Line":
        return self._lines[job.sampling.grammar is not None]

    def _start(self, line: "_Line") -> None:
        max_running = MAX_THREADS if line is self._lines[True] else 1
        while line.num_running < max_running and (job := line.next()) is not None:
            line.num_running += 1
            thread = threading.Thread(
                target=self._run, args=(job,), name="zipage-grammar", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no thread left to give
                job.error = f"the grammar could not be prepared: {error}; try again later"
                self._settled.put(job)

    def _run(self, job: Job) -> None:
        try:
            self._prepare(job.sampling)
        except ValueError as error:
            job.error = str(error)
        except Exception as error:  # a thread's errors reach nobody else
            job.error = f"the grammar could not be prepared: {error!r:.300}"
        self._settled.put(job)


class _Line:
    """Jobs that have not begun, tenant by tenant in turns."""

    def __init__(self) -> None:
        self.num_running = 0
        self._of: OrderedDict[str, dict[Job, None]] = OrderedDict()  # next tenant first

    def num_queued(self, tenant: str) -> int:
        return len(self._of.get(tenant, ()))

    def add(self, job: Job) -> None:
        self._of.setdefault(job.tenant, {})[job] = None

    def withdraw(self, job: Job) -> bool:
        own = self._of.get(job.tenant, {})
        if job not in own:
            return False
        del own[job]
        if not own:
            del self._of[job.tenant]
        return True

    def next(self) -> Job | None:
        """Out of the line: the first of the tenant whose turn it is."""
        if not self._of:
            return None
        tenant, own = self._of.popitem(last=False)
        job = next(iter(own))
        del own[job]
        if own:
            self._of[tenant] = own
        return job
