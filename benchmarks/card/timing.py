"""Timing on the card: CUDA events around graph replays, medians of repeats.

Knows nothing of what is timed.
"""

import statistics
import time
from collections.abc import Callable

import torch


class Captured:
    """A graph with what it was captured from: it reads the memory of what `work` holds."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
        self._graph, self._work = graph, work

    def replay(self) -> None:
        self._graph.replay()


def capture(work: Callable[[], object], warmups: int = 2) -> Captured:
    """`work` as a graph, after warming it up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return Captured(graph, work)


def event_ms(work: Callable[[], object], repeats: int = 10, warmups: int = 2) -> float:
    """Median device time of one call, in milliseconds."""
    times = []
    for repeat in range(warmups + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= warmups:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes that the card reads and writes a second; the memory is free again afterwards."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (event_ms(lambda: target.copy_(source)) / 1e3)


def host_us(work: Callable[[], object], repeats: int = 20, warmups: int = 3) -> float:
    """Median host time of one call that returns before the device is done, in microseconds."""
    times = []
    for repeat in range(warmups + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if repeat >= warmups:
            times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6
