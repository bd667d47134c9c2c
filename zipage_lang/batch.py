"""Programs that run side by side: every result is kept, whatever one of them does.

Knows nothing of programs' bodies, states or engines.
"""

import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zipage_lang.errors import BatchError, ProgramTimeoutError, RunCancelledError
from zipage_lang.loops import LoopBridge

Outcome = tuple[int, Any]  # a program's place, and its state or what it raised


@dataclasses.dataclass(frozen=True)
class BatchPolicy:
    """What a batch does about programs that raise or take long. Raises ValueError for bad values.

    max_errors: with more than so many that raised, the rest is given up; None: never.
    timeout: seconds that each attempt may take from the start of its body; None: no limit.
    retries: how often a program that raised an error with `retryable` set is run again.
    """

    max_errors: int | None = None
    timeout: float | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        if self.max_errors is not None and not _is_count(self.max_errors):
            raise ValueError(f"max_errors={self.max_errors!r} must be a whole number, 0 or more")
        if not _is_count(self.retries):
            raise ValueError(f"retries={self.retries!r} must be a whole number, 0 or more")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r} must be seconds above zero")


class Attempt(Protocol):
    """One run of one program, about to begin."""

    def submitted(self, pool: Executor, on_begin: Callable[[], None]) -> "Future[Any]": ...

    def cancel(self, reason: str) -> None: ...


class Batch:
    """The programs of one batch. Iterating starts them and yields each outcome as it comes."""

    def __init__(
        self,
        new_attempts: Sequence[Callable[[], Attempt]],
        pool: Executor,
        bridge: LoopBridge,
        policy: BatchPolicy,
    ) -> None:
        self._new_attempts = new_attempts
        self._pool = pool
        self._bridge = bridge
        self._policy = policy
        self._lock = threading.Lock()
        self._running: dict[int, Attempt] = {}
        self._num_retries = dict.fromkeys(range(len(new_attempts)), 0)  # of those not settled
        self._num_errors = 0
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._new_attempts)

    def __iter__(self) -> Iterator[Outcome]:
        try:
            for index in range(len(self)):
                self._begin(index)
            for _ in range(len(self)):
                yield self._outcomes.get()
        finally:
            self.cancel("the batch was given up")
            self._pool.shutdown(wait=False, cancel_futures=True)

    def cancel(self, reason: str) -> None:
        """Give up all that have not ended; their outcome is a RunCancelledError."""
        with self._lock:
            unsettled = list(self._num_retries)
        for index in unsettled:
            self._settle(index, RunCancelledError(reason))

    def _begin(self, index: int) -> None:
        with self._lock:
            if index not in self._num_retries:
                return
            attempt = self._running[index] = self._new_attempts[index]()
        future = attempt.submitted(self._pool, lambda: self._start_clock(index, attempt))
        future.add_done_callback(lambda done: self._take(index, attempt, done))

    def _start_clock(self, index: int, attempt: Attempt) -> None:
        timeout = self._policy.timeout
        if timeout is not None:
            loop = self._bridge.loop
            timed = weakref.ref(attempt)  # so that the timer keeps no program that has ended
            self._bridge.call(
                lambda: loop.call_later(timeout, self._take_timeout, index, timed, timeout)
            )

    def _take_timeout(self, index: int, timed: "weakref.ref[Attempt]", timeout: float) -> None:
        attempt = timed()
        if attempt is not None and self._running.get(index) is attempt:
            self._settle(index, ProgramTimeoutError(timeout))

    def _take(self, index: int, attempt: Attempt, done: "Future[Any]") -> None:
        if self._running.get(index) is not attempt:
            return  # it was settled while it ran
        error = RunCancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._settle(index, done.result())
        elif self._may_retry(index, error):
            self._begin(index)
        else:
            self._settle(index, error)

    def _may_retry(self, index: int, error: BaseException) -> bool:
        with self._lock:
            num_retries = self._num_retries.get(index, self._policy.retries)
            if not getattr(error, "retryable", False) or num_retries >= self._policy.retries:
                return False
            self._num_retries[index] += 1
            return True

    def _settle(self, index: int, result: Any) -> None:
        """The first outcome of a program is the one that counts."""
        is_error = isinstance(result, BaseException)
        with self._lock:
            if self._num_retries.pop(index, None) is None:
                return
            attempt = self._running.pop(index, None)
            self._num_errors += is_error
            limit = self._policy.max_errors
            is_over = limit is not None and self._num_errors == limit + 1
        self._outcomes.put((index, result))
        if is_error and attempt is not None:
            attempt.cancel(str(result))
        if is_over:
            self.cancel(f"more than max_errors={limit} programs of the batch raised")


def collect(batch: Batch, *, progress_bar: bool, return_exceptions: bool) -> list[Any]:
    """The results of all programs, in their order, once the last one is done.

    Raises BatchError where some raised, unless `return_exceptions`.
    """
    results: list[Any] = [None] * len(batch)
    columns = (TextColumn("programs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not progress_bar) as progress:
        task = progress.add_task("programs", total=len(batch))
        for index, result in batch:
            results[index] = result
            progress.advance(task)
    first = next((result for result in results if isinstance(result, BaseException)), None)
    if first is not None and not return_exceptions:
        raise BatchError(results) from first
    return results


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
