"""What the kernel benchmarks share: a case, its median time inside a CUDA graph, its line of table.

Knows nothing of any kernel.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

COPY_BYTES_PER_S = 4.285e12  # measured device-to-device copy of one H200, read plus written


class Case(NamedTuple):
    """One kernel at one shape."""

    name: str
    call: Callable[[], object]
    num_bytes: int  # that must move: every input read once, every output written once


def median_us(call: Callable[[], object], calls_per_graph: int = 1, num_replays: int = 15) -> float:
    """Median over replays of the device time per call, in microseconds, without host launches."""
    for _ in range(3):
        call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls_per_graph):
            call()
    times_ms = []
    for _ in range(num_replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms) / calls_per_graph * 1e3


def measure(case: Case, calls_per_graph: int = 1, num_replays: int = 15) -> dict[str, float]:
    """Times a case, prints its line, and returns time, bytes and share of copy bandwidth."""
    us = median_us(case.call, calls_per_graph, num_replays)
    share = case.num_bytes / (us * 1e-6) / COPY_BYTES_PER_S
    print(f"  {case.name:36} {us:10.2f} us {case.num_bytes / 1e6:9.2f} MB {share:7.1%}")
    return {"us": round(us, 2), "bytes": case.num_bytes, "share": round(share, 4)}
