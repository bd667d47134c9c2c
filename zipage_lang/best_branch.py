"""`best_of`: branches side by side, each is scored, the best one wins, a good one ends it early.

Knows nothing of requests, tokens or how bodies run.
"""

import asyncio
import dataclasses
import math
from typing import Any

from zipage_lang.bodies import (
    Bodies,
    Body,
    as_ended,
    check_body,
    end_tasks,
    group_of,
    stop_reason_of,
    wait_for,
)
from zipage_lang.budgets import Budget
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.state import StateHandle
from zipage_lang.state_core import StateCore

LOGPROB = "logprob"


@dataclasses.dataclass(frozen=True)
class BestOfResult:
    """What best_of came to.

    Parameters:
        branch: the best one; `s.adopt(branch)` takes its text. None where none has a score.
        index: its place, and None likewise.
        score: its score, and None likewise.
        answer: what the body gave there.
        scores: by branch; None where it was stopped or raised.
        answers: by branch, likewise.
        errors: by branch, what it or its scoring raised.
        num_stopped: branches that were cancelled at the threshold.
        reason: "threshold", "all ended", or "budget: ..." and what ran out.
        branches: all of them, as `s.fork` gives them.

    Errors: none of its own.

    >>> zipage.BestOfResult(None, None, None, None, [], [], [], 0, "all ended", None).scores
    []
    """

    branch: Any
    index: int | None
    score: float | None
    answer: Any
    scores: list[float | None]
    answers: list[Any]
    errors: list[BaseException | None]
    num_stopped: int
    reason: str
    branches: Any


def best_of(
    s: StateHandle,
    n: int,
    body: Body,
    *,
    score: Body = LOGPROB,
    threshold: float | None = None,
    kv: KVParams | None = None,
    budget: Budget | None = None,
) -> Any:
    """Run `body` on `n` branches of `s` side by side and take the one with the highest score.

    Parameters:
        s: the state to fork; in an `async def` program await the result.
        n: how many branches.
        body: as for `vote`.
        score: "logprob" (the mean log-probability of the tokens the branch drew), a function of the
            branch (`def` or `async def`), or a gen or program that judges: it goes on from the
            branch, leaves no text there, and its value is the score, or the first number in it.
        threshold: a branch with at least this score ends it, and the rest is cancelled.
        kv, budget: as for `s.fork`, for each branch.

    Of equal scores the lowest index wins. Returns a BestOfResult. Errors: ValueError for a bad
    count, body or score; if no branch has a score and no budget is the reason, the first error.

    >>> def program(s):
    ...     return zipage.best_of(s, 2, zipage.gen("x"), score=lambda b: len(b["x"])).score
    >>> zipage.function(program).run(backend=zipage.testing.ScriptedBackend("four")).ret_value
    4.0
    """
    check_body(body, "body")
    if score != LOGPROB:
        check_body(score, "score")
    cores = s.core.fork(n, kv, budget, "best_of")
    contest = _Contest(s, cores, score, math.inf if threshold is None else threshold)
    return wait_for(s, contest.run(body))


class _Contest:
    """Branches that run and are scored, until all have ended or one is good enough."""

    def __init__(
        self, s: StateHandle, cores: list[StateCore], score: Body, threshold: float
    ) -> None:
        self._s = s
        self._cores = cores
        self._score, self._threshold = score, threshold
        self._bodies = Bodies(s, len(cores))
        self._answers: list[Any] = [None] * len(cores)
        self._scores: list[float | None] = [None] * len(cores)
        for core in cores:
            core.door.wants_logprobs = isinstance(score, str) and score == LOGPROB

    async def run(self, body: Body) -> BestOfResult:
        tasks = [asyncio.ensure_future(self._run_one(body, i)) for i in range(len(self._cores))]
        num_stopped = 0
        try:
            async for _ in as_ended(tasks):
                if self._is_won:
                    break
        finally:
            num_stopped = await end_tasks(tasks, self._cores, "another branch is good enough")
            self._bodies.close()
        return self._result([None if t.cancelled() else t.exception() for t in tasks], num_stopped)

    async def _run_one(self, body: Body, index: int) -> None:
        core = self._cores[index]
        self._answers[index] = await self._bodies.run(body, core)
        await core.drained()
        if isinstance(self._score, str):
            self._scores[index] = _mean(core.door.logprobs)
        else:
            self._scores[index] = await self._bodies.score(self._score, core)

    @property
    def _is_won(self) -> bool:
        return any(score is not None and score >= self._threshold for score in self._scores)

    def _result(self, errors: list[BaseException | None], num_stopped: int) -> BestOfResult:
        known = [(-score, i) for i, score in enumerate(self._scores) if score is not None]
        best = min(known)[1] if known else None
        stopped = stop_reason_of(self._cores)
        first = next((error for error in errors if error is not None), None)
        if best is None and stopped is None and first is not None:
            raise first
        group = group_of(self._s, self._cores)
        return BestOfResult(
            branch=None if best is None else group[best],
            index=best,
            score=None if best is None else self._scores[best],
            answer=None if best is None else self._answers[best],
            scores=self._scores,
            answers=self._answers,
            errors=errors,
            num_stopped=num_stopped,
            reason="threshold" if self._is_won else stopped or "all ended",
            branches=group,
        )


def _mean(logprobs: list[float]) -> float:
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf
