"""What a soak watches: memory, threads and files of processes, sizes of tables, and their trends.

Knows nothing of clients, or of how the processes were started.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

MIB = 2**20
WARM_UP = 1 / 3  # of the time: pools, caches and allocators reach their size
# What counts as growth. Allocators breathe by some MiB; and at the CPU soak's some ten requests a
# second, 0.5 MiB a minute is about 1 KiB kept of each request.
MIB_PER_MINUTE = 0.5
BREATH_MIB = 8.0
# Tables follow the load, and caches fill up: the line through a table's sizes may rise by so much,
# as a share of their mean or in entries. One that is never cleaned rises by its mean.
TABLE_SHARE, TABLE_SPARE = 0.3, 8


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process, as the system counts it."""

    rss_mib: float
    num_threads: int
    num_fds: int

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessUse":
        with process.oneshot():
            rss = process.memory_info().rss / MIB
            return cls(rss, process.num_threads(), process.num_fds())


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one time."""

    at_s: float
    processes: dict[str, ProcessUse]
    tables: dict[str, int]


class Watch:
    """Samples taken in the course of a soak, and what they come to."""

    def __init__(
        self,
        processes: Mapping[str, psutil.Process],
        tables: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tables: sizes by name, asked for at each sample."""
        self._processes, self._tables, self._clock = processes, tables, clock
        self._started = clock()
        self.samples: list[Sample] = []

    def take(self) -> None:
        """Raises psutil.Error where a process is gone."""
        used = {name: ProcessUse.of(process) for name, process in self._processes.items()}
        self.samples.append(Sample(self._clock() - self._started, used, dict(self._tables())))

    def report(self) -> dict[str, Any]:
        """Per process and table: where it stood after the warm-up, at its highest, at the end."""
        late = self._late
        minutes = [sample.at_s / 60 for sample in late]
        return {
            "fitted_minutes": round(minutes[-1] - minutes[0], 1),
            "num_samples": len(self.samples),
            "processes": {
                name: self._process_report(name, late) for name in self.samples[-1].processes
            },
            "tables": {
                name: {
                    "highest": max(sample.tables[name] for sample in self.samples),
                    "last": self.samples[-1].tables[name],
                    "rise": round(rise(minutes, [sample.tables[name] for sample in late]), 1),
                }
                for name in self.samples[-1].tables
            },
        }

    def growing(self) -> list[str]:
        """What did not stay flat after the warm-up, with numbers."""
        late = self._late
        minutes = [sample.at_s / 60 for sample in late]
        length, found = minutes[-1] - minutes[0], []
        for name in late[-1].processes:
            used = [sample.processes[name] for sample in late]
            per_minute = slope(minutes, [use.rss_mib for use in used])
            if per_minute * length > max(BREATH_MIB, MIB_PER_MINUTE * length):
                found.append(f"{name}: memory grows by {per_minute:.2f} MiB a minute")
            found += [
                f"{name}: {what} grows"
                for what in ("num_threads", "num_fds")
                if _grows(minutes, [getattr(use, what) for use in used])
            ]
        found += [
            f"table {table} grows"
            for table in late[-1].tables
            if _grows(minutes, [sample.tables[table] for sample in late])
        ]
        return found

    @property
    def _late(self) -> list[Sample]:
        """The samples behind the warm-up."""
        begin = self.samples[-1].at_s * WARM_UP
        late = [sample for sample in self.samples if sample.at_s >= begin]
        assert len(late) >= 4, f"{len(late)} samples are too few to see a trend"
        return late

    def _process_report(self, name: str, late: Sequence[Sample]) -> dict[str, float]:
        minutes = [sample.at_s / 60 for sample in late]
        rss = [sample.processes[name].rss_mib for sample in late]
        everything = [sample.processes[name] for sample in self.samples]
        return {
            "rss_mib_start": round(everything[0].rss_mib, 1),
            "rss_mib_warm": round(rss[0], 1),
            "rss_mib_highest": round(max(use.rss_mib for use in everything), 1),
            "rss_mib_last": round(rss[-1], 1),
            "mib_per_minute": round(slope(minutes, rss), 3),
            "threads_highest": max(use.num_threads for use in everything),
            "threads_last": everything[-1].num_threads,
            "fds_highest": max(use.num_fds for use in everything),
            "fds_last": everything[-1].num_fds,
        }


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the least squares line."""
    return statistics.linear_regression(times, values).slope


def rise(times: Sequence[float], values: Sequence[float]) -> float:
    """By how much the line through the values rises from the first time to the last."""
    return slope(times, values) * (times[-1] - times[0])


def _grows(times: Sequence[float], sizes: Sequence[int]) -> bool:
    return rise(times, sizes) > max(TABLE_SPARE, TABLE_SHARE * statistics.fmean(sizes))
