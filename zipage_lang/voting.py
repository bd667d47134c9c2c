"""`vote`: branches answer, the most frequent answer wins, and what can't change that is stopped.

Knows nothing of requests, tokens or how bodies run.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from zipage_lang.bodies import Bodies, Body, check_body, end_tasks, wait_for
from zipage_lang.branches import AsyncBranches, Branches
from zipage_lang.budgets import Budget
from zipage_lang.interpreter import StateCore
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.state import AsyncState, StateHandle


@dataclasses.dataclass(frozen=True)
class VoteResult:
    """What a vote came to.

    Parameters:
        winner: the most frequent answer (as `key` made it); of equally frequent ones that of the
            branch with the lowest index; None where nobody voted.
        counts: votes by answer, the winner first.
        answers: by branch, as the body gave them; None for no answer.
        errors: by branch, what its body raised; None for none.
        num_stopped: branches that were cancelled because they could change nothing.
        reason: "lead", "quorum", "all ended", or "budget: ..." and what ran out.
        branches: all of them, as `s.fork` gives them.
        branch: the first one that gave the winning answer; `s.adopt(branch)` takes its text.

    Errors: none of its own.

    >>> result = zipage.VoteResult("a", {"a": 1}, ["a"], [None], 0, "all ended", None, None)
    >>> result.winner
    'a'
    """

    winner: Any
    counts: dict[Any, int]
    answers: list[Any]
    errors: list[BaseException | None]
    num_stopped: int
    reason: str
    branches: Any
    branch: Any


class Ballot:
    """Counts answers as they come. A branch without an answer has ended and not voted."""

    def __init__(self, num_branches: int, quorum: int | None) -> None:
        self.num_running = num_branches
        self._quorum = quorum
        self._voters: dict[Any, list[int]] = {}

    def cast(self, branch: int, answer: Any) -> None:
        """Raises ValueError for an answer that can't be counted."""
        self.num_running -= 1
        if answer is None:
            return
        try:
            self._voters.setdefault(answer, []).append(branch)
        except TypeError as error:
            raise ValueError(f"answer {answer!r} can't be counted; give key=...") from error

    @property
    def ranking(self) -> list[tuple[Any, list[int]]]:
        """Answers and who gave them: the most frequent first, then by the first branch."""
        return sorted(self._voters.items(), key=lambda item: (-len(item[1]), min(item[1])))

    @property
    def decision(self) -> str | None:
        """Why the vote is over, though branches still run; None while it is not.

        "lead": even if all that run agreed on the runner-up, the leader would stay ahead.
        """
        counts = [len(voters) for _, voters in self.ranking]
        lead = counts[0] - (counts[1] if len(counts) > 1 else 0) if counts else 0
        if self._quorum is not None and counts and counts[0] >= self._quorum:
            return "quorum"
        return "lead" if lead > self.num_running > 0 else None


def vote(
    s: StateHandle,
    n: int,
    body: Body,
    *,
    key: Callable[[Any], Any] | None = None,
    quorum: int | None = None,
    kv: KVParams | None = None,
    budget: Budget | None = None,
) -> Any:
    """Let `n` branches of `s` answer and take the most frequent answer; stop when it is sure.

    The early stop is exact: branches are cancelled only when the leader's lead is larger than the
    number of those still running, so the winner is that of the full vote. Of equally frequent
    answers the one whose first branch has the lowest index wins. An answer of None is no vote;
    neither is that of a branch whose body raised, or that a budget stopped.

    Parameters:
        s: the state to fork; in an `async def` program await the result.
        n: how many branches.
        body: a gen (its value is the answer), a function of the branch (its return value; `async
            def` takes no thread) or a program.
        key: makes of an answer what is counted, "42." and "42" alike; None of it is no vote.
        quorum: stop as soon as so many agree. Exact only above half of `n`.
        kv, budget: as for `s.fork`, for each branch.

    Returns a VoteResult. Errors: ValueError for a bad count, quorum or body, and for answers that
    can't be counted; if every branch raised, the first one's error.

    >>> def program(s): return zipage.vote(s, 5, zipage.gen("answer")).winner
    >>> zipage.function(program).run(backend=zipage.testing.ScriptedBackend("42")).ret_value
    '42'
    """
    check_body(body, "body")
    if quorum is not None and (isinstance(quorum, bool) or not 1 <= quorum <= n):
        raise ValueError(f"quorum={quorum!r} must be from 1 to n={n}")
    cores = s.core.fork(n, kv, budget, "vote")
    return wait_for(s, _run(s, cores, body, key or _same, Ballot(n, quorum)))


async def _run(
    s: StateHandle,
    cores: list[StateCore],
    body: Body,
    key: Callable[[Any], Any],
    ballot: Ballot,
) -> VoteResult:
    bodies = Bodies(s, len(cores))
    answers: list[Any] = [None] * len(cores)
    errors: list[BaseException | None] = [None] * len(cores)
    tasks = [asyncio.ensure_future(bodies.run(body, core)) for core in cores]
    places = {task: index for index, task in enumerate(tasks)}
    decision, waiting, num_stopped = None, set(tasks), 0
    try:
        while waiting and decision is None:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for index in sorted(places[task] for task in done):
                error = tasks[index].exception()
                has_vote = error is None and cores[index].door.stop_reason is None
                answers[index] = tasks[index].result() if has_vote else None
                errors[index] = error
                answer = answers[index]
                ballot.cast(index, None if answer is None else key(answer))
                decision = decision or ballot.decision
    finally:
        num_stopped = await end_tasks(tasks, cores, "the vote is decided")
        bodies.close()
    ranking = ballot.ranking
    stop_reason = next((c.door.stop_reason for c in cores if c.door.stop_reason), None)
    if not ranking and stop_reason is None:
        _raise_if_all_failed(errors)
    over = "all ended" if stop_reason is None else f"budget: {stop_reason}"
    handles = [bodies.handle(core) for core in cores]
    group: Any = AsyncBranches if isinstance(s, AsyncState) else Branches
    return VoteResult(
        winner=ranking[0][0] if ranking else None,
        counts={answer: len(voters) for answer, voters in ranking},
        answers=answers,
        errors=errors,
        num_stopped=num_stopped,
        reason=decision or over,
        branches=group(s.core, handles),
        branch=handles[min(ranking[0][1])] if ranking else None,
    )


def _raise_if_all_failed(errors: list[BaseException | None]) -> None:
    failed = [error for error in errors if error is not None]
    if failed and len(failed) == len(errors):
        failed[0].add_note(f"all {len(errors)} branches of the vote raised; this is the first")
        raise failed[0]


def _same(answer: Any) -> Any:
    return answer
