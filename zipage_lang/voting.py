"""`vote`: branches answer, the most frequent answer wins, and what can't change that is stopped.

Knows nothing of requests, tokens or how bodies run.
"""

import asyncio
import dataclasses
from collections.abc import Callable
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


@dataclasses.dataclass(frozen=True)
class VoteResult:
    """What a vote came to.

    Parameters:
        winner: the most frequent answer (as `key` made it); of equally frequent ones that of the
            branch with the lowest index; None where nobody voted.
        counts: votes by answer, the winner first.
        answers: by branch, as the body gave them; None for none, or for one too late to count.
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
    return wait_for(s, _Vote(s, cores, key or _same, Ballot(n, quorum)).run(body))


class _Vote:
    """Branches that answer, until all have ended or the ballot is decided."""

    def __init__(
        self, s: StateHandle, cores: list[StateCore], key: Callable[[Any], Any], ballot: Ballot
    ) -> None:
        self._s = s
        self._cores = cores
        self._key = key
        self._ballot = ballot
        self._decision: str | None = None
        self._answers: list[Any] = [None] * len(cores)
        self._errors: list[BaseException | None] = [None] * len(cores)

    async def run(self, body: Body) -> VoteResult:
        bodies = Bodies(self._s, len(self._cores))
        tasks = [asyncio.ensure_future(bodies.run(body, core)) for core in self._cores]
        num_stopped = 0
        try:
            async for index in as_ended(tasks):
                self._take(index, tasks[index])
                if self._decision is not None:
                    break
        finally:
            num_stopped = await end_tasks(tasks, self._cores, "the vote is decided")
            bodies.close()
        return self._result(num_stopped)

    def _take(self, index: int, task: "asyncio.Task[Any]") -> None:
        """One branch has ended."""
        error = self._errors[index] = task.exception()
        if error is None and self._cores[index].door.stop_reason is None:
            self._answers[index] = task.result()
        answer = self._answers[index]
        self._ballot.cast(index, None if answer is None else self._key(answer))
        self._decision = self._ballot.decision

    def _result(self, num_stopped: int) -> VoteResult:
        ranking = self._ballot.ranking
        stopped = stop_reason_of(self._cores)
        if not ranking and stopped is None:
            self._raise_if_all_failed()
        group = group_of(self._s, self._cores)
        return VoteResult(
            winner=ranking[0][0] if ranking else None,
            counts={answer: len(voters) for answer, voters in ranking},
            answers=self._answers,
            errors=self._errors,
            num_stopped=num_stopped,
            reason=self._decision or stopped or "all ended",
            branches=group,
            branch=group[min(ranking[0][1])] if ranking else None,
        )

    def _raise_if_all_failed(self) -> None:
        failed = [error for error in self._errors if error is not None]
        if failed and len(failed) == len(self._errors):
            failed[0].add_note(f"all {len(failed)} branches of the vote raised; this is the first")
            raise failed[0]


def _same(answer: Any) -> Any:
    return answer
