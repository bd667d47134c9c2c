"""OpenAI's wire format: sampling fields as a request's, and a stream's chunks as outputs.

Knows nothing of connections, prompts or programs.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from zipage_lang.frontend.outputs import FINISH_LENGTH, FINISH_STOP, RequestOutput
from zipage_lang.http_client import checked, garbled
from zipage_lang.runtime.messages import KVUsage, Usage
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


class Delta(msgspec.Struct):
    """What a chat chunk adds to a sample."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _EchoedLogprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    text_offset: list[int] | None = None


class Choice(msgspec.Struct):
    """One sample's part of a chunk; completions have `text`, chats `delta`."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class _Scored(msgspec.Struct):
    logprobs: _EchoedLogprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class TokenCounts(msgspec.Struct):
    """A request's usage; our own server may add how its KV cache stands."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    kv: KVUsage | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    id: str | None = None
    choices: list[Choice] | None = None
    usage: TokenCounts | None = None
    kv: KVUsage | None = None


class _Echo(msgspec.Struct):
    choices: list[_Scored] = []


def own_tokens(reply: Mapping[str, Any], start: int, end: int) -> list[float]:
    """Logprobs of an echo's tokens that hold characters of [start, end); one that reaches over the
    border counts whole. The first token of all has none, which counts as 0. [] where the server
    echoed no logprobs. Raises ServerError for what is no reply.
    """
    choices = checked(reply, _Echo).choices
    logprobs = (choices[0].logprobs if choices else None) or _EchoedLogprobs()
    rows = zip(
        logprobs.tokens or [],
        logprobs.token_logprobs or [],
        logprobs.text_offset or [],
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
        self._usage = TokenCounts()
        self._latest = {
            index: RequestOutput(
                request_id="", prompt_token_ids=list(prompt_token_ids), sample_index=index
            )
            for index in range(sampling.n)
        }

    def take(self, event: Mapping[str, Any]) -> Iterator[RequestOutput]:
        """What a chunk adds; ends are kept for `ends`. Raises ServerError for what is none."""
        chunk = checked(event, Chunk)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices or ():
            index = choice.index
            if index not in self._latest:
                raise garbled(f"the server told of sample {index} of {len(self._latest)}")
            before = self._latest[index]
            delta = choice.delta or Delta()
            text = choice.text or delta.content or ""
            thought = delta.reasoning_content or delta.reasoning or ""
            reason = choice.finish_reason or before.finish_reason
            self._latest[index] = dataclasses.replace(
                before,
                request_id=chunk.id or before.request_id,
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
        usage = self._usage
        details = usage.prompt_tokens_details or _PromptDetails()
        return Usage(
            prompt_tokens=usage.prompt_tokens or 0,
            completion_tokens=(usage.completion_tokens or 0) if index == 0 else 0,
            cached_tokens=details.cached_tokens or 0,
        )
