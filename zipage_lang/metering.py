"""Charges what one request draws to a budget, and ends its samples where that has run out.

Knows nothing of states, tasks or how a request is sent.
"""

import dataclasses
from collections.abc import Sequence

import msgspec

from zipage_lang.backend import Backend
from zipage_lang.budgets import Account
from zipage_lang.frontend.outputs import FINISH_LENGTH, RequestOutput
from zipage_lang.runtime.sampling_params import SamplingParams


class Meter:
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
        self._latest = {index: nothing_yet(token_ids, index) for index in range(sampling.n)}
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
        return with_end(output, self.stop_reason or "")

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


def nothing_yet(token_ids: Sequence[int], sample_index: int) -> RequestOutput:
    return RequestOutput(request_id="", prompt_token_ids=list(token_ids), sample_index=sample_index)


def with_end(output: RequestOutput, reason: str) -> RequestOutput:
    return dataclasses.replace(output, finish_reason=FINISH_LENGTH, stop_reason=f"budget: {reason}")
