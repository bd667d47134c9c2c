"""`best_of`: branches side by side, each is scored, the best one wins, a good one ends it early.

Knows nothing of requests, tokens or how bodies run.
"""

import asyncio
import dataclasses
import math
from typing import Any

from zipage_lang.bodies import Bodies, Body, check_body, end_tasks, wait_for
from zipage_lang.branches import AsyncBranches, Branches
from zipage_lang.budgets import Budget
from zipage_lang.interpreter import StateCore
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.state import AsyncState, StateHandle

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
    cores = s.core.fork(n, kv, budget, "best of")
    return wait_for(s, _run(s, cores, body, score, math.inf if threshold is None else threshold))


async def _run(
    s: StateHandle, cores: list[StateCore], body: Body, score: Body, threshold: float
) -> BestOfResult:
    bodies = Bodies(s, len(cores))
    answers: list[Any] = [None] * len(cores)
    scores: list[float | None] = [None] * len(cores)
    errors: list[BaseException | None] = [None] * len(cores)

    async def run_one(index: int) -> None:
        answers[index] = await bodies.run(body, cores[index])
        await asyncio.wrap_future(cores[index].barrier())
        scores[index] = await _score(bodies, score, cores[index])

    for core in cores:
        core.door.wants_logprobs = isinstance(score, str) and score == LOGPROB
    tasks = [asyncio.ensure_future(run_one(index)) for index in range(len(cores))]
    waiting, winner, num_stopped = set(tasks), None, 0
    try:
        while waiting and winner is None:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            winner = next(
                (i for i, x in enumerate(scores) if x is not None and x >= threshold), None
            )
    finally:
        num_stopped = await end_tasks(tasks, cores, "another branch is good enough")
        bodies.close()
    for index, task in enumerate(tasks):
        errors[index] = None if task.cancelled() else task.exception()
    reason = "all ended" if winner is None else "threshold"
    stop_reason = next((c.door.stop_reason for c in cores if c.door.stop_reason), None)
    if winner is None and stop_reason is not None:
        reason = f"budget: {stop_reason}"
    best = _best(scores)
    first = next((error for error in errors if error is not None), None)
    if best is None and stop_reason is None and first is not None:
        raise first
    handles = [bodies.handle(core) for core in cores]
    group: Any = AsyncBranches if isinstance(s, AsyncState) else Branches
    return BestOfResult(
        branch=None if best is None else handles[best],
        index=best,
        score=None if best is None else scores[best],
        answer=None if best is None else answers[best],
        scores=scores,
        answers=answers,
        errors=errors,
        num_stopped=num_stopped,
        reason=reason,
        branches=group(s.core, handles),
    )


async def _score(bodies: Bodies, score: Body, core: StateCore) -> float:
    if core.error is not None:
        raise core.error
    if not isinstance(score, str):
        return await bodies.score(score, core)
    drawn = core.door.logprobs
    return math.fsum(drawn) / len(drawn) if drawn else -math.inf


def _best(scores: list[float | None]) -> int | None:
    known = [(-score, index) for index, score in enumerate(scores) if score is not None]
    return min(known)[1] if known else None
