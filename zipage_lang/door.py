"""One state's way to its backend: what it continues from, what it may spend, how it scored.

To the calls it is a backend like any other.
Knows nothing of queues, variables or text that the author wrote.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, cast

from zipage_lang.backend import Scoring
from zipage_lang.budgets import Account
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.lineage import Lineage
from zipage_lang.metering import Meter, nothing_yet, with_end
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.session import Session

Outputs = AsyncIterator[RequestOutput]


class StateDoor:
    """The backend as one state sees it."""

    def __init__(self, session: Session) -> None:
        self.lineage = None if session.held is None else Lineage(session.held)
        self.account: Account | None = None
        self.is_cancelled = False  # the state was: its calls end as cancelled, whatever the budget
        self.stop_reason: str | None = None  # which limit of a budget last stopped a call here
        self.has_stopped_call = False  # in the call that runs
        self.is_generating = True  # else it scores choices, which is charged to no budget
        self.wants_logprobs = False
        self.logprobs: list[float] = []  # of all tokens drawn, where they are wanted
        self._session = session
        self._backend = session.settings.backend

    def __del__(self) -> None:
        """Nobody can go on from here: the engine need not wait for that."""
        loop = self._session.bridge.loop
        if self.lineage is not None and self.lineage.holds and not loop.is_closed():
            loop.call_soon_threadsafe(self.lineage.release)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # nothing of a backend, but of a door not made yet
        return getattr(self._backend, name)

    def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, kv: KVParams, group_id: str
    ) -> Outputs:
        """As Backend.generate, within the state's budget."""
        if not self.is_generating:
            return self._send(token_ids, sampling, kv, group_id)
        if self.wants_logprobs and sampling.logprobs is None:
            sampling = sampling.replace(logprobs=0)
        if self.account is None:
            outputs = self._send(token_ids, sampling, kv, group_id)
        else:
            outputs = self._metered(self.account, token_ids, sampling, kv, group_id)
        return self._scored(outputs) if self.wants_logprobs else outputs

    def refused(self, reason: str, sampling: SamplingParams) -> list[RequestOutput]:
        """What a call gets that no budget is left for: an end without tokens for each sample."""
        self._note_stop(reason)
        return [with_end(nothing_yet([], index), reason) for index in range(sampling.n)]

    def _note_stop(self, reason: str) -> None:
        self.stop_reason, self.has_stopped_call = reason, True

    def release(self) -> None:
        """Hold nothing in the engine."""
        if self.lineage is not None:
            self.lineage.release()

    def share(self, token_ids: list[int], doors: "list[StateDoor]") -> None:
        """Branches behind these doors start from one state in the engine; a single one needs none.

        `token_ids` are all that was said before the fork.
        """
        if self.lineage is None or len(doors) < 2 or not token_ids:
            return
        fork = self.lineage.fork_state(self._session.spawn, token_ids, len(doors))
        for door in doors:
            if door.lineage is not None:
                door.lineage.start_at(fork)
            if door.is_cancelled:
                door.release()

    def take_over(self, other: "StateDoor") -> None:
        """This state now says what the other one said, and goes on from there."""
        if self.lineage is not None and other.lineage is not None:
            self.lineage.take_over(other.lineage)

    def _send(
        self, token_ids: Sequence[int], sampling: SamplingParams, kv: KVParams, group_id: str
    ) -> Outputs:
        if self.lineage is None:
            return self._backend.generate(token_ids, sampling, kv=kv, group_id=group_id)
        holds = self.is_generating and sampling.n == 1
        return self.lineage.stream(token_ids, sampling, kv=kv, group_id=group_id, holds=holds)

    async def _scored(self, outputs: Outputs) -> AsyncGenerator[RequestOutput, None]:
        async with contextlib.aclosing(cast("AsyncGenerator[RequestOutput]", outputs)) as stream:
            async for output in stream:
                if output.is_final:
                    self.logprobs += [entry.logprob for entry in output.logprobs or []]
                yield output

    async def _metered(
        self,
        account: Account,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        kv: KVParams,
        group_id: str,
    ) -> AsyncGenerator[RequestOutput, None]:
        left = account.tokens_left
        if account.must_stop or left == 0 or not account.hold_kv(len(token_ids) * sampling.n):
            for output in self.refused(account.reason or "kv_tokens", sampling):
                yield output
            return
        meter = Meter(account, self._backend, token_ids, sampling)
        if left is not None and left < sampling.max_tokens:
            sampling = sampling.replace(max_tokens=left, min_tokens=min(sampling.min_tokens, left))
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        account.watch(task)
        try:
            outputs = self._send(token_ids, sampling, kv, group_id)
            async with contextlib.aclosing(
                cast("AsyncGenerator[RequestOutput]", outputs)
            ) as stream:
                async for output in stream:
                    shown = meter.take(output)
                    if meter.reason is not None:
                        break
                    yield shown
        except asyncio.CancelledError:
            is_given_up = self.is_cancelled or self._session.cancelled_by is not None
            if is_given_up or not account.must_stop:
                raise
            task.uncancel()
        finally:
            account.unwatch(task)
            meter.give_back()
        ends = meter.ends()
        if meter.stop_reason is not None:
            self._note_stop(meter.stop_reason)
        for output in ends:
            yield output


class ScoringDoor(StateDoor):
    """The door to a backend that scores choices its own way."""

    async def score_row(
        self, token_ids: Sequence[int], choice: Sequence[int], *, kv: KVParams, group_id: str
    ) -> list[float]:
        scoring = cast("Scoring", self._backend)
        return await scoring.score_row(token_ids, choice, kv=kv, group_id=group_id)


def open_door(session: Session) -> StateDoor:
    """A door for one state of the run."""
    return ScoringDoor(session) if session.scores_itself else StateDoor(session)
