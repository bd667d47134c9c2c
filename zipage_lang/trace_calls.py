"""One call's lines: what its streamed outputs tell of first token, reuse and compactions.

Knows nothing of states, runs or files.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from zipage_lang.thoughts import ThoughtMarks
from zipage_lang.trace_events import (
    CacheHit,
    CallEnd,
    CallStatus,
    Compaction,
    FirstToken,
    KVState,
    Sample,
)

MAX_REASON_LEN = 2000


class CallTrace:
    """A call under way. `put(kind, **fields)` writes a line of the call's state."""

    def __init__(
        self, put: Callable[..., None], call: int, marks: ThoughtMarks | None = None
    ) -> None:
        self._put = put
        self._call = call
        self._marks = marks  # what tells a thought in texts whose thinking nobody watches
        self._began = time.perf_counter()
        self._has_token = False
        self._latest: dict[tuple[str, int], Any] = {}  # by request and sample: its last output
        self._requests: set[str] = set()

    def saw(self, output: Any) -> None:
        """One RequestOutput; cumulative, so what is new is the difference to the one before."""
        key = (output.request_id, output.sample_index)
        before = self._latest.get(key)
        self._latest[key] = output
        if not self._has_token and output.token_ids:
            self._has_token = True
            self._put(FirstToken, call=self._call)
        if output.request_id not in self._requests:
            self._requests.add(output.request_id)
            self._tell_reuse(output.usage)
        kv, kv_before = output.kv, before.kv if before is not None else KVState()
        if kv.compactions > kv_before.compactions:
            self._put(
                Compaction,
                call=self._call,
                sample=output.sample_index,
                count=kv.compactions - kv_before.compactions,
                logical_len=kv.logical_len,
                resident_len=kv.resident_len,
                dropped=max(0, kv.dropped - kv_before.dropped),
            )

    def end(self, status: CallStatus, *, scored: Any = None, error: Any = None) -> None:
        """The call's last line, with all that was seen of it."""
        outputs = [self._latest[key] for key in self._latest]
        outputs.sort(key=lambda output: output.sample_index)
        usages = [output.usage for output in outputs]
        self._put(
            CallEnd,
            call=self._call,
            status=status,
            seconds=round(time.perf_counter() - self._began, 6),
            tokens=sum(usage.completion_tokens for usage in usages) if scored is None else 0,
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            samples=[self._sample(output) for output in outputs]
            if scored is None
            else [Sample(text=scored.choice, kv=kv_state(scored.kv))],
            choice=None if scored is None else scored.index,
            distribution=[] if scored is None else list(scored.distribution),
            error=None if error is None else reason_of(error),
        )

    def _sample(self, output: Any) -> Sample:
        thinking, text = output.thinking, output.answer if output.thinking else output.text
        if self._marks is not None:
            thinking, text = self._marks.split(output.text)
        return Sample(
            text=text,
            thinking=thinking or None,
            tokens=output.usage.completion_tokens,
            finish_reason=output.finish_reason,
            logprob_mean=_mean_logprob(output.logprobs),
            kv=kv_state(output.kv),
        )

    def _tell_reuse(self, usage: Any) -> None:
        if usage.cached_tokens:
            self._put(
                CacheHit,
                call=self._call,
                cached_tokens=usage.cached_tokens,
                prompt_tokens=usage.prompt_tokens,
            )


def kv_state(kv: Any) -> KVState:
    """A messages.KVUsage as the trace has it."""
    return KVState(**{name: getattr(kv, name) for name in KVState.__struct_fields__})


def reason_of(error: BaseException) -> str:
    """An error as one line of text."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON_LEN]


def _mean_logprob(logprobs: Any) -> float | None:
    if not logprobs:
        return None
    mean = math.fsum(entry.logprob for entry in logprobs) / len(logprobs)
    return mean if math.isfinite(mean) else None
