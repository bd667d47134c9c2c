"""What /generate takes and gives: our own wire (deltas) and SGLang's (cumulative).

Knows nothing of engines or HTTP.
"""

import uuid
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import KVUsage, LogprobEntry, Usage
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.bodies import Items
from zipage_lang.server.names import Name, PlainText

MAX_PROMPTS = 1024
ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

T = TypeVar("T")
TokenIds = list[int]


class GenerateRequest(BaseModel):
    """A generation from one prompt, or from several: `text` or `input_ids`, one of them.

    `sampling_params` holds fields of SamplingParams (`max_new_tokens` is `max_tokens`), `kv` those
    of KVParams. Fields that are not known are ignored.
    """

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={
            "examples": [{"text": "The fox", "sampling_params": {"max_new_tokens": 8}}]
        },
    )

    text: str | Items[str] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, description="first prompt token to score; -1: none")
    top_logprobs_num: int = Field(0, ge=0, le=20)
    stream: bool = False
    stream_format: Literal["cumulative", "delta"] = "cumulative"
    rid: Name | None = Field(None, description="the request's id; request_id is the same")
    request_id: Name | None = None
    kv: dict[str, Any] | None = None
    group_id: PlainText = Field("", description="requests that can be aborted together")
    parent_id: Name | None = Field(None, description="start from this request's state")
    hold: bool = Field(False, description="keep the state at the end, until /release")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="lower goes first")
    cache_salt: str = Field("", description="requests of other salts never share KV")

    @property
    def prompts(self) -> list[str | TokenIds]:
        """All prompts. Raises ApiError 400 where there is none, or both kinds."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "give text or input_ids, one of them", param="text")
        given: Any = self.input_ids if self.text is None else self.text
        prompts = given if self.is_batch else [given]
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise ApiError(400, f"{len(prompts)} prompts; give from 1 to {MAX_PROMPTS}")
        return list(prompts)

    @property
    def is_batch(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]

    def ids(self) -> list[str]:
        """An engine's request id for each prompt."""
        root = self.rid or self.request_id or uuid.uuid4().hex
        return [f"{root}-{i}" for i in range(len(self.prompts))] if self.is_batch else [root]

    def sampling(self) -> SamplingParams:
        """Raises ApiError 400 for a field that does not fit."""
        given = {
            ALIASES.get(name, name): value
            for name, value in (self.sampling_params or {}).items()
            if value is not None
        }
        if self.return_logprob:
            given.setdefault("logprobs", self.top_logprobs_num)
            if self.logprob_start_len >= 0:
                given.setdefault("prompt_logprobs", self.top_logprobs_num)
                given.setdefault("prompt_logprobs_start", self.logprob_start_len)
        return _convert(given, SamplingParams, "sampling_params")

    def kv_params(self) -> KVParams | None:
        """Raises ApiError 400 for a field that does not fit."""
        if not self.kv:
            return None
        unknown = set(self.kv) - set(KVParams.__dataclass_fields__)
        if unknown:  # a bound that is not kept would be found out late
            known = ", ".join(KVParams.__dataclass_fields__)
            raise ApiError(400, f"unknown kv field {min(unknown)!r}; known: {known}", param="kv")
        return _convert(self.kv, KVParams, "kv")


def _convert(fields: dict[str, Any], kind: type[T], param: str) -> T:
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one output adds, as zipage_lang/server_backend.py reads it."""

    request_id: str
    sample_index: int
    text_delta: str
    token_ids: TokenIds
    logprobs: list[LogprobEntry] | None = None
    prompt_logprobs: list[LogprobEntry | None] | None = None
    thinking: str | None = None
    answer: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage
    kv: KVUsage


class DeltaWriter:
    """Turns a request's outputs into deltas that name it as its caller does."""

    def __init__(self, name: str, *, has_thinking: bool) -> None:
        self._name = name
        self._has_thinking = has_thinking
        self._num_told: dict[int, int] = {}
        self._has_prompt: set[int] = set()  # samples whose prompt's log-probabilities were told

    def delta(self, output: RequestOutput) -> Delta:
        """What is new since this sample's last output."""
        before = self._num_told.get(output.sample_index, 0)
        self._num_told[output.sample_index] = len(output.token_ids)
        prompt = None if output.sample_index in self._has_prompt else output.prompt_logprobs
        if prompt is not None:
            self._has_prompt.add(output.sample_index)
        return Delta(
            request_id=self._name,
            sample_index=output.sample_index,
            text_delta=output.text_delta,
            token_ids=output.token_ids[before:],
            logprobs=None if output.logprobs is None else output.logprobs[before:],
            prompt_logprobs=prompt,
            thinking=output.thinking if self._has_thinking else None,
            answer=output.answer if self._has_thinking else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            usage=output.usage,
            kv=output.kv,
        )


def cumulative(
    output: RequestOutput, name: str, index: int, start_len: int, seconds: float
) -> dict[str, Any]:
    """A sample as it stands, as SGLang's clients read it; `index` counts prompts and samples.

    `name`: the request's, as its caller knows it.
    """
    return {
        "index": index,
        "text": output.text,
        "output_ids": output.token_ids,
        "meta_info": {
            "id": name,
            "finish_reason": _finish(output),
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "cached_tokens": output.usage.cached_tokens,
            "e2e_latency": seconds,
            "kv": output.kv,
            **_logprobs(output, max(0, start_len)),
        },
    }


def _finish(output: RequestOutput) -> dict[str, Any] | None:
    if output.finish_reason is None:
        return None
    reason: dict[str, Any] = {"type": output.finish_reason}
    if output.finish_reason == "stop":
        reason["matched"] = output.stop_reason
    if output.finish_reason == "length":
        reason["length"] = output.usage.completion_tokens
    return reason


def _logprobs(output: RequestOutput, start_len: int) -> dict[str, Any]:
    """Lists of (logprob, token id, None); what has no logprob has None in its place."""
    told: dict[str, Any] = {}
    if output.logprobs is not None:
        told["output_token_logprobs"] = [(e.logprob, e.token_id, None) for e in output.logprobs]
        told["output_top_logprobs"] = [_top(entry) for entry in output.logprobs]
    if output.prompt_logprobs is not None:
        entries = output.prompt_logprobs[start_len:]
        ids = output.prompt_token_ids[start_len:]
        told["input_token_logprobs"] = [
            (None if entry is None else entry.logprob, token_id, None)
            for entry, token_id in zip(entries, ids, strict=True)
        ]
        told["input_top_logprobs"] = [None if e is None else _top(e) for e in entries]
    return told


def _top(entry: LogprobEntry) -> Sequence[tuple[float, int, None]]:
    return [(logprob, token_id, None) for token_id, logprob in entry.top]
