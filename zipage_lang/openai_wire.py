"""OpenAI's wire format: sampling fields as a request's, and a stream's chunks as outputs.

Knows nothing of connections, prompts or programs.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zipage_lang.frontend.outputs import FINISH_LENGTH, FINISH_STOP, RequestOutput
from zipage_lang.runtime.messages import Usage
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server_backend import changed_fields
from zipage_lang.text_tokens import encode_text

STANDARD_FIELDS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "n",
    }
)


def request_fields(sampling: SamplingParams, *, chat: bool) -> dict[str, Any]:
    """The request's fields. max_tokens and temperature always go: servers' defaults differ."""
    fields = changed_fields(sampling)
    fields |= {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    if "json_schema" in fields and chat:
        schema = {"name": "value", "strict": True, "schema": json.loads(fields.pop("json_schema"))}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def own_tokens(reply: Mapping[str, Any], start: int, end: int) -> list[float]:
    """Logprobs of an echo's tokens that hold characters of [start, end); one that reaches over the
    border counts whole. The first token of all has none, which counts as 0. [] where the server
    echoed no logprobs.
    """
    logprobs = reply["choices"][0].get("logprobs") or {}
    rows = zip(
        logprobs.get("tokens") or [],
        logprobs.get("token_logprobs") or [],
        logprobs.get("text_offset") or [],
        strict=False,
    )
    return [
        logprob or 0.0
        for token, logprob, offset in rows
        if offset + len(token) > start and offset < end
    ]


class Samples:
    """The outputs of one streamed request, put together chunk by chunk."""

    def __init__(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._usage: Mapping[str, Any] = {}
        self._latest = {
            index: RequestOutput(
                request_id="", prompt_token_ids=list(prompt_token_ids), sample_index=index
            )
            for index in range(sampling.n)
        }

    def take(self, event: Mapping[str, Any]) -> Iterator[RequestOutput]:
        """What a chunk adds; ends are kept for `ends`."""
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            index = choice.get("index", 0)
            before = self._latest[index]
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            reason = choice.get("finish_reason") or before.finish_reason
            self._latest[index] = dataclasses.replace(
                before,
                request_id=event.get("id", before.request_id),
                text=before.text + text,
                text_delta=text,
                thinking=before.thinking + thought,
                answer=before.text + text,
                token_ids=[*before.token_ids, *encode_text(text)],
                finish_reason=reason,
            )
            if text:
                yield dataclasses.replace(self._latest[index], finish_reason=None)

    def ends(self) -> Iterator[RequestOutput]:
        """The last output of each sample."""
        for index, output in self._latest.items():
            reason = output.finish_reason or FINISH_STOP
            is_known = reason in (FINISH_STOP, FINISH_LENGTH)
            yield dataclasses.replace(
                output,
                text_delta="",
                finish_reason=reason if is_known else FINISH_STOP,
                stop_reason=None if is_known else reason,
                usage=self._counts(index),
            )

    def _counts(self, index: int) -> Usage:
        details = self._usage.get("prompt_tokens_details") or {}
        return Usage(
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            completion_tokens=self._usage.get("completion_tokens", 0) if index == 0 else 0,
            cached_tokens=details.get("cached_tokens") or 0,
        )
