"""Zipage-Lang's own server over HTTP as a Backend: the same programs, the engine elsewhere.

What goes over the wire (JSON; a field that is left out has its default):

    GET  /get_model_info   -> {"model", "eos_token_ids", "max_model_len", ...}
    GET  /tokenizer_files  -> {"files": {"tokenizer.json": text, ...}}: what from_pretrained reads
    POST /generate  {"input_ids", "sampling_params", "kv", "group_id", "request_id", "parent_id",
                     "hold", "stream": true, "stream_format": "delta"}
         -> events {"request_id", "sample_index", "text_delta", "token_ids" (new ones),
                    "logprobs" (of the new ones), "prompt_logprobs" (once a sample), "thinking"
                    and "answer" (all so far, with thinking control), "finish_reason",
                    "stop_reason", "usage", "kv"}, then [DONE]; or {"error": {"message", "code"}}
    POST /abort_request {"group_id"},  POST /release {"request_ids"}
    POST /flush_cache,  GET /server_info  -> counters

A logprob entry is [token_id, logprob, rank, [[token_id, logprob], ...]]. `sampling_params` and `kv`
are read by `msgspec.convert(fields, SamplingParams, str_keys=True)` and its like.
Knows nothing of programs or of how the server works.
"""

import asyncio
import dataclasses
import logging
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from zipage_lang.errors import ServerError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.frontend.pin_board import PinBoard
from zipage_lang.frontend.tokenizer import load_tokenizer
from zipage_lang.http_client import HttpClient, checked
from zipage_lang.loops import shared_loop
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import KVUsage, LogprobEntry, Usage
from zipage_lang.runtime.sampling_params import SamplingParams

DEFAULTS = SamplingParams()

log = logging.getLogger("zipage.server_backend")


@runtime_checkable
class Tokenizing(Protocol):
    """The tokenizer a program needs; frontend.tokenizer.Tokenizer is one."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str: ...


class _Delta(msgspec.Struct, kw_only=True):
    """One event of /generate."""

    request_id: str = ""
    sample_index: int = 0
    text_delta: str = ""
    token_ids: list[int] = []
    logprobs: list[LogprobEntry] | None = None
    prompt_logprobs: list[LogprobEntry | None] | None = None
    thinking: str | None = None
    answer: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage = Usage()
    kv: KVUsage = KVUsage()


class ServerBackend:
    """A server of ours, for `backend=` and `set_default_backend`. Also named RuntimeEndpoint.

    Parameters:
        url: where it listens, say "http://127.0.0.1:30000".
        api_key: sent as a bearer token.
        tokenizer: a tokenizer, or the folder or GGUF file of one; None asks the server for its own.
        timeout_s: the longest silence within one answer.

    Errors: ServerError where the server does not answer, ValueError for a bad url or tokenizer.

    >>> zipage.ServerBackend("127.0.0.1:30000")
    Traceback (most recent call last):
    ValueError: url='127.0.0.1:30000' must begin with http:// or https://
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tokenizer: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._http = HttpClient(url, api_key=api_key, timeout_s=timeout_s)
        self._info = self._http.get_blocking("/get_model_info")
        self._eos_token_ids = checked(self._info.get("eos_token_ids"), frozenset[int])
        self._tokenizer = _tokenizer(tokenizer, self._http)
        self._posts: set[asyncio.Task[Any]] = set()
        self.pins = PinBoard()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return shared_loop()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        return self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)

    def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, kv: KVParams, group_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """As Backend.generate."""
        return self._stream(token_ids, _body(token_ids, sampling, kv, group_id))

    def generate_from(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv: KVParams,
        group_id: str,
        request_id: str,
        parent_id: str | None,
        hold: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As StateKeeper.generate_from."""
        place = {"request_id": request_id, "parent_id": parent_id, "hold": hold}
        return self._stream(token_ids, _body(token_ids, sampling, kv, group_id) | place)

    async def compute(
        self,
        token_ids: Sequence[int],
        *,
        kv: KVParams,
        group_id: str,
        request_id: str,
        parent_id: str | None,
    ) -> None:
        """As StateKeeper.compute."""
        async for _ in self.generate_from(
            token_ids,
            SamplingParams(max_tokens=1, temperature=0.0),
            kv=kv,
            group_id=group_id,
            request_id=request_id,
            parent_id=parent_id,
            hold=True,
        ):
            pass

    def release(self, request_ids: Sequence[str]) -> None:
        """As StateKeeper.release; returns at once."""
        post = self.loop.create_task(self._release([*request_ids]))
        self._posts.add(post)
        post.add_done_callback(self._posts.discard)

    async def abort(self, group_id: str) -> None:
        await self._http.post("/abort_request", {"group_id": group_id})

    async def flush_cache(self) -> Mapping[str, Any]:
        return await self._http.post("/flush_cache", {})

    async def server_info(self) -> Mapping[str, Any]:
        return {**self._info, **await self._http.get("/server_info")}

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _release(self, request_ids: list[str]) -> None:
        try:
            await self._http.post("/release", {"request_ids": request_ids})
        except ServerError as error:  # nobody waits; a server that is gone holds nothing
            log.info("states not released: %s", error)

    async def _stream(
        self, token_ids: Sequence[int], body: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        latest: dict[int, RequestOutput] = {}
        async for event in self._http.events("/generate", body):
            delta = checked(event, _Delta)
            before = latest.get(delta.sample_index)
            if before is None:
                before = RequestOutput(
                    request_id=delta.request_id,
                    prompt_token_ids=list(token_ids),
                    sample_index=delta.sample_index,
                )
            latest[delta.sample_index] = _extended(before, delta)
            yield latest[delta.sample_index]


def _extended(before: RequestOutput, delta: _Delta) -> RequestOutput:
    logprobs = before.logprobs
    if delta.logprobs is not None:
        logprobs = [*(logprobs or []), *delta.logprobs]
    text = before.text + delta.text_delta
    return dataclasses.replace(
        before,
        text=text,
        thinking=before.thinking if delta.thinking is None else delta.thinking,
        answer=text if delta.answer is None else delta.answer,
        text_delta=delta.text_delta,
        token_ids=[*before.token_ids, *delta.token_ids],
        logprobs=logprobs,
        prompt_logprobs=delta.prompt_logprobs or before.prompt_logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        usage=delta.usage,
        kv=delta.kv,
    )


def _body(
    token_ids: Sequence[int], sampling: SamplingParams, kv: KVParams, group_id: str
) -> dict[str, Any]:
    return {
        "input_ids": list(token_ids),
        "sampling_params": msgspec.to_builtins(changed_fields(sampling), str_keys=True),
        "kv": {name: value for name, value in _fields(kv).items() if value is not None},
        "group_id": group_id,
        "stream": True,
        "stream_format": "delta",
    }


def changed_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults, so that an older server takes them too."""
    defaults = _fields(DEFAULTS)
    return {n: value for n, value in _fields(sampling).items() if value != defaults[n]}


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _tokenizer(given: Any, http: HttpClient) -> Tokenizing:
    if isinstance(given, str | Path):
        return load_tokenizer(given)
    if given is not None:
        if not isinstance(given, Tokenizing):
            raise ValueError(f"tokenizer={given!r} must have encode, decode and render_chat")
        return given
    files = checked(http.get_blocking("/tokenizer_files").get("files"), dict[str, str])
    with tempfile.TemporaryDirectory(prefix="zipage-tokenizer-") as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)
