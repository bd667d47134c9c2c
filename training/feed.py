"""Batches drawn ahead by worker processes and handed out in order, wherever they were drawn.

Knows nothing of models or of what is in a batch.
"""

import collections
import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from packing import BatchSize, PackedBatch, Source, draw_batch

Job = tuple[list[float], int, int]  # weights of the cells, seed, index

_here: list[tuple[Source, BatchSize]] = []  # in a worker process: what its batches are drawn from


@dataclasses.dataclass(frozen=True)
class FeedState:
    """Where a feed stands: what a later one needs to hand out the same batches."""

    next_index: int
    jobs: tuple[Job, ...]  # of the batches begun and not handed out


class Feed:
    """Hands out batch after batch; each depends on its index and weights only."""

    def __init__(
        self,
        source: Source,
        size: BatchSize,
        num_workers: int,
        seed: int,
        weights: Callable[[], list[float]],
        resume: FeedState | None = None,
    ) -> None:
        """weights: asked when a batch is begun, which is some batches before it is used."""
        self._source, self._size, self._num_workers = source, size, num_workers
        self._seed, self._weights = seed, weights
        self.waited_s = 0.0
        self._pool = self._new_pool()
        self._next_index = resume.next_index if resume else 0
        self._ahead: collections.deque[tuple[Job, Future[PackedBatch]]] = collections.deque()
        for job in resume.jobs if resume else ():
            self._begin(job)
        self._fill()

    def next(self) -> PackedBatch:
        """The next batch; waits until it is drawn."""
        started = time.monotonic()
        job, future = self._ahead.popleft()
        try:
            batch = future.result()
        except BrokenProcessPool:  # a worker was killed, for memory say
            batch = draw_batch(self._source, self._size, *job)
            self._replace_pool()
        self.waited_s += time.monotonic() - started
        self._fill()
        return batch

    def state(self) -> FeedState:
        return FeedState(self._next_index, tuple(job for job, _ in self._ahead))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while len(self._ahead) < 2 * self._num_workers:
            self._begin((self._weights(), self._seed, self._next_index))
            self._next_index += 1

    def _begin(self, job: Job) -> None:
        try:
            future = self._pool.submit(_draw_here, *job)
        except BrokenProcessPool:
            self._replace_pool()
            future = self._pool.submit(_draw_here, *job)
        self._ahead.append((job, future))

    def _replace_pool(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._new_pool()
        jobs = [job for job, _ in self._ahead]
        self._ahead.clear()
        for job in jobs:
            self._begin(job)

    def _new_pool(self) -> ProcessPoolExecutor:
        # Forked workers have torch's code already and never touch it; spawned ones would take
        # seconds each to import it.
        return ProcessPoolExecutor(
            self._num_workers,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_settle_here,
            initargs=(self._source, self._size),
        )


def _settle_here(source: Source, size: BatchSize) -> None:
    _here[:] = [(source, size)]


def _draw_here(weights: list[float], seed: int, index: int) -> PackedBatch:
    source, size = _here[0]
    return draw_batch(source, size, weights, seed, index)
