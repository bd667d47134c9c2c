"""From samples to the numbers of a table: one summary per cell, paired with full KV.

Knows nothing of engines, files' names or how numbers are shown.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from zipage_lang.evaluation.run_file import Lap, RunData, Sample
from zipage_lang.evaluation.statistics import (
    Interval,
    difference_interval,
    majority,
    mean_interval,
    pass_at_k,
    percentile,
    ratio_interval,
)

FULL_MODE = "off"
LONG_SHARE = 0.95


class CellSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Every number of one cell. Lengths in tokens; differences are problem by problem."""

    task: str
    mode: str
    policy: str  # with its parameters; "" under full KV
    budget: int
    asked_budget: str
    interval: int
    protect: str
    num_problems: int
    num_samples: int  # per problem
    pass_at: dict[int, Interval]  # by k
    majority_at: dict[int, Interval]  # by k; empty where no sample has an answer to vote with
    mean_len: Interval
    p95_len: float
    mean_solved_len: float | None
    share_cut: float  # samples that hit the limit of length
    mean_resident: float  # mean over samples of the most slots held at once
    compactions_per_sample: float
    tok_s: float | None  # None where the cell shared the engine with others
    wall_s: float | None
    tokens_per_solved: float | None  # all output tokens over right samples; None without one
    s_per_solved: float | None  # the same in seconds, at the cell's own rate
    peak_blocks: int | None
    num_displaced: int | None  # preemptions and swap-outs
    pass_difference: Interval | None  # to full KV's pass@1; None where full KV has not been run
    pass_ratio: Interval | None
    len_ratio: Interval | None  # of mean lengths, to full KV's

    @property
    def is_full(self) -> bool:
        return self.mode == FULL_MODE

    @property
    def label(self) -> str:
        """What the row is called."""
        return "full" if self.is_full else self.policy


def summarise(runs: Sequence[RunData]) -> list[CellSummary]:
    """One summary per run with whole problems, full KV first within each task."""
    cells = [cell for cell in (_Cell(run) for run in runs) if cell.problems]
    full = {cell.task: cell for cell in cells if cell.is_full}
    summaries = [cell.summary(full.get(cell.task)) for cell in cells]
    return sorted(summaries, key=_order)


def _order(summary: CellSummary) -> tuple[Any, ...]:
    return (
        summary.task,
        not summary.is_full,
        summary.label,
        summary.mode,
        summary.protect,
        summary.interval,
        summary.budget,
    )


class _Cell:
    """One run's samples, by problem; only problems whose samples are all there count."""

    def __init__(self, run: RunData) -> None:
        self.header, self._laps = run.header, run.laps
        self.task = run.header.task
        self._num_samples = int(run.header.sampling["samples"])
        by_problem: dict[str, dict[int, Sample]] = {}
        for sample in run.samples:
            by_problem.setdefault(sample.problem, {})[sample.sample] = sample
        wanted = range(self._num_samples)
        self.problems = {
            problem: [found[index] for index in wanted]
            for problem, found in by_problem.items()
            if all(index in found for index in wanted)
        }
        self._samples = [sample for group in self.problems.values() for sample in group]

    @property
    def is_full(self) -> bool:
        return bool(self.header.setting["mode"] == FULL_MODE)

    def summary(self, full: "_Cell | None") -> CellSummary:
        samples, setting = self._samples, self.header.setting
        lens = [sample.tokens for sample in samples]
        solved_lens = [sample.tokens for sample in samples if sample.correct]
        num = len(samples)
        return CellSummary(
            task=self.task,
            mode=setting["mode"],
            policy=setting["policy"],
            budget=setting["budget"],
            asked_budget=self.header.asked_budget,
            interval=setting["interval"],
            protect=setting["protect"],
            num_problems=len(self.problems),
            num_samples=self._num_samples,
            pass_at={k: self._pass_at(k) for k in _doubling(self._num_samples)},
            majority_at=self._majorities(),
            mean_len=mean_interval(list(self._mean_lens().values())),
            p95_len=percentile(lens, LONG_SHARE),
            mean_solved_len=sum(solved_lens) / len(solved_lens) if solved_lens else None,
            share_cut=sum(sample.finish == "length" for sample in samples) / num,
            mean_resident=sum(sample.resident for sample in samples) / num,
            compactions_per_sample=sum(sample.compactions for sample in samples) / num,
            tokens_per_solved=sum(lens) / len(solved_lens) if solved_lens else None,
            **_of_laps(self._laps, sum(lens), len(solved_lens)),
            **self._against(full),
        )

    def _pass_at(self, k: int) -> Interval:
        return mean_interval(
            [
                pass_at_k(len(group), sum(sample.correct for sample in group), k)
                for group in self.problems.values()
            ]
        )

    def _majorities(self) -> dict[int, Interval]:
        """Of the first k samples, for k from 3: two can only tie or agree."""
        if all(sample.answer is None for sample in self._samples):
            return {}
        sizes = [k for k in _doubling(self._num_samples) if k > 2]
        return {k: mean_interval([_vote(g[:k]) for g in self.problems.values()]) for k in sizes}

    def _pass_rates(self) -> dict[str, float]:
        return {
            problem: sum(sample.correct for sample in group) / len(group)
            for problem, group in self.problems.items()
        }

    def _mean_lens(self) -> dict[str, float]:
        return {
            problem: sum(sample.tokens for sample in group) / len(group)
            for problem, group in self.problems.items()
        }

    def _against(self, full: "_Cell | None") -> dict[str, Any]:
        """On the problems that both have."""
        shared = [problem for problem in self.problems if full and problem in full.problems]
        if full is None or full is self or not shared:
            return {"pass_difference": None, "pass_ratio": None, "len_ratio": None}
        ours, theirs = _both(self._pass_rates(), full._pass_rates(), shared)
        our_lens, their_lens = _both(self._mean_lens(), full._mean_lens(), shared)
        return {
            "pass_difference": difference_interval(ours, theirs),
            "pass_ratio": ratio_interval(ours, theirs),
            "len_ratio": ratio_interval(our_lens, their_lens),
        }


def _both(
    left: dict[str, float], right: dict[str, float], problems: list[str]
) -> tuple[list[float], list[float]]:
    return [left[problem] for problem in problems], [right[problem] for problem in problems]


def _vote(samples: Sequence[Sample]) -> float:
    return majority([s.answer for s in samples], [s.correct for s in samples])


def _doubling(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return [*sizes, largest]


def _of_laps(laps: Sequence[Lap], num_tokens: int, num_solved: int) -> dict[str, Any]:
    if not laps:
        names = ("tok_s", "wall_s", "s_per_solved", "peak_blocks", "num_displaced")
        return dict.fromkeys(names)
    wall_s = sum(lap.wall_s for lap in laps)
    tok_s = sum(lap.tokens for lap in laps) / wall_s
    return {
        "tok_s": tok_s,
        "wall_s": wall_s,
        "s_per_solved": num_tokens / tok_s / num_solved if num_solved and tok_s else None,
        "peak_blocks": max(lap.peak_blocks for lap in laps),
        "num_displaced": sum(lap.preemptions + lap.swap_outs for lap in laps),
    }
