"""One state's way to its backend: what it continues from, what it may spend, how it scored.

To the calls it is a backend like any other.
Knows nothing of queues, variables or text that the author wrote.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, cast

import msgspec

from zipage_lang.backend import Backend, Scoring
from zipage_lang.budgets import Account
from zipage_lang.frontend.outputs import FINISH_LENGTH, RequestOutput
from zipage_lang.lineage import Lineage
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
        return [_end(_nothing([], index), reason) for index in range(sampling.n)]

    def _note_stop(self, reason: str) -> None:
        self.stop_reason, self.has_stopped_call = reason, True

    def release(self) -> None:
        """Hold nothing in the engine."""
        if self.lineage is not None:
            self.lineage.release()

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
        meter = _Meter(account, self._backend, token_ids, sampling)
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


class _Meter:
    """Charges one request's outputs to an account, token by token."""

    def __init__(
        self,
        account: Account,
        backend: Backend,
        token_ids: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        self.reason: str | None = None  # set: nothing more may be drawn
        self.stop_reason: str | None = None  # why the budget ended one of the samples
        self._account = account
        self._backend = backend
        self._sampling = sampling
        self._num_held = len(token_ids) * sampling.n
        self._latest = {index: _nothing(token_ids, index) for index in range(sampling.n)}
        self._unshown: int | None = None  # the sample whose last output was not shown

    def take(self, output: RequestOutput) -> RequestOutput:
        """The output as far as it can be paid for, to be shown where `reason` is still None."""
        before = self._latest[output.sample_index]
        num_before = len(before.token_ids)
        num_new = len(output.token_ids) - num_before
        num_taken = self._account.take_tokens(num_new)
        if num_taken < num_new:
            output = self._cut(output, before, num_before + num_taken)
        elif output.finish_reason == FINISH_LENGTH and self._is_cut_short(output):
            output = self._ended(output)
        self._latest[output.sample_index] = output
        if not output.is_final or num_taken < num_new:
            self._look_on(num_taken)
        elif self._account.must_stop and self._is_any_running():
            self.reason = self._account.reason
        self._unshown = output.sample_index if self.reason is not None else None
        return output

    def give_back(self) -> None:
        """The request holds no KV any more."""
        self._account.hold_kv(-self._num_held)

    def ends(self) -> list[RequestOutput]:
        """The ends of what was stopped, and of the output that was not shown for that reason."""
        return [self._end_of(o) for o in self._latest.values() if self._is_missing(o)]

    def _is_missing(self, output: RequestOutput) -> bool:
        return not output.is_final or output.sample_index == self._unshown

    def _end_of(self, output: RequestOutput) -> RequestOutput:
        if output.is_final:
            return output
        ended = self._ended(output)
        is_shown = output.sample_index != self._unshown
        return dataclasses.replace(ended, text_delta="") if is_shown else ended

    def _look_on(self, num_more: int) -> None:
        if self._account.must_stop:
            self.reason = self._account.reason
        elif self._account.hold_kv(num_more):
            self._num_held += num_more
        else:
            self.reason = "kv_tokens"

    def _is_any_running(self) -> bool:
        return any(not output.is_final for output in self._latest.values())

    def _is_cut_short(self, output: RequestOutput) -> bool:
        return len(output.token_ids) < self._sampling.max_tokens and self._account.must_stop

    def _ended(self, output: RequestOutput) -> RequestOutput:
        self.stop_reason = self.reason or self._account.reason
        return _end(output, self.stop_reason or "")

    def _cut(self, output: RequestOutput, before: RequestOutput, num_kept: int) -> RequestOutput:
        kept = output.token_ids[:num_kept]
        text = self._backend.decode(kept, skip_special_tokens=self._sampling.skip_special_tokens)
        text = text.removesuffix("\ufffd") if num_kept > len(before.token_ids) else before.text
        return dataclasses.replace(
            output,
            token_ids=kept,
            text=text,
            text_delta=text[len(before.text) :],
            logprobs=None if output.logprobs is None else output.logprobs[:num_kept],
            usage=msgspec.structs.replace(output.usage, completion_tokens=num_kept),
            finish_reason=None,
            stop_reason=None,
        )


def _nothing(token_ids: Sequence[int], sample_index: int) -> RequestOutput:
    return RequestOutput(request_id="", prompt_token_ids=list(token_ids), sample_index=sample_index)


def _end(output: RequestOutput, reason: str) -> RequestOutput:
    return dataclasses.replace(output, finish_reason=FINISH_LENGTH, stop_reason=f"budget: {reason}")
