"""Any OpenAI-compatible server as a Backend: text in, text out, no token ids.

A program's tokens are characters here, so its text goes on exactly as it came; counts of real
tokens are the server's own.
Knows nothing of programs or of KV caches.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

from zipage_lang.errors import UnsupportedError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.http_client import HttpClient
from zipage_lang.loops import shared_loop
from zipage_lang.openai_wire import STANDARD_FIELDS, Samples, own_tokens, request_fields
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server_backend import changed_fields
from zipage_lang.text_tokens import decode_text, encode_text, messages_of, render_marked

UNREAD = frozenset({"logprobs", "prompt_logprobs", "prompt_logprobs_start", "think"})
Render = Callable[[Sequence[Mapping[str, str]], bool], str]


class OpenAIBackend:
    """A server with /completions or /chat/completions, for `backend=`.

    Programs run as they do on an engine, by sending their whole text with each call. What such a
    server can't do raises UnsupportedError where it is appended: `kv=`, token ids, prompt logprobs,
    fields that it is not said to have, and, on /chat/completions, select, score and gens outside of
    an assistant message. Budgets count characters; `usage` holds the server's counts, over all
    samples in the first one. A forked prefix is computed as often as the server likes. What a chat
    server tells apart as reasoning stands in `s.meta(name).thinking` and is no part of the text.

    Parameters:
        model: the server's name for it.
        url: up to and with the version, say "http://127.0.0.1:8000/v1".
        api_key: sent as a bearer token.
        chat: use /chat/completions; else /completions.
        extensions: SamplingParams fields that this server takes beyond OpenAI's own, say
            ("regex", "top_k", "min_p").
        render: for roles on /completions, the model's chat template as a function of (messages,
            add_generation_prompt).
        continues: whether the chat server goes on from a begun assistant message
            (`continue_final_message`); without it, text before a gen in that message is refused.
        timeout_s: the longest silence within one answer.

    Errors: ValueError for a bad url or an unknown extension; calls raise ServerError, or ValueError
    for what the server calls a bad request, where their values are read.

    >>> zipage.OpenAIBackend("small", url="http://127.0.0.1:8000/v1", extensions=["regexp"])
    Traceback (most recent call last):
    ValueError: extensions: 'regexp' is no sampling field
    """

    def __init__(
        self,
        model: str,
        *,
        url: str,
        api_key: str | None = None,
        chat: bool = False,
        extensions: Iterable[str] = (),
        render: Render | None = None,
        continues: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._http = HttpClient(url, api_key=api_key, timeout_s=timeout_s)
        self._model = model
        self._chat = chat
        self._render = render
        self._continues = continues
        self._known = STANDARD_FIELDS | _checked(extensions) | ({"json_schema"} if chat else set())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return shared_loop()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return encode_text(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return decode_text(token_ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        if self._chat:
            return render_marked(messages, add_generation_prompt)
        self.check_role()
        assert self._render is not None, "check_role raises without one"
        return self._render(messages, add_generation_prompt)

    # What can't be is said where it is appended.

    def check_gen(self, sampling: SamplingParams, kv: KVParams) -> None:
        """Raises UnsupportedError for a field that the server would not know."""
        self._check_kv(kv)
        for name in changed_fields(sampling):
            if name not in self._known:
                hint = "name it in extensions= if the server has it"
                raise UnsupportedError(self, f"{name}=", hint)

    def check_select(self, method: str, kv: KVParams) -> None:
        """Raises UnsupportedError where choices can't be scored."""
        self._check_kv(kv)
        if self._chat:
            raise UnsupportedError(self, "select or score on /chat/completions", "use chat=False")
        if method == "unconditional_likelihood_normalized":
            raise UnsupportedError(self, f"method={method!r}", "use another method")

    def check_role(self) -> None:
        """Raises UnsupportedError without a chat template."""
        if not self._chat and self._render is None:
            raise UnsupportedError(self, "roles", "give render= or chat=True")

    def check_token_ids(self) -> None:
        """Raises UnsupportedError: they are the server's secret."""
        raise UnsupportedError(self, "token_ids()")

    def _check_kv(self, kv: KVParams) -> None:
        if kv != KVParams():
            raise UnsupportedError(self, "kv=", "only Zipage-Lang's engine bounds the KV cache")

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, kv: KVParams, group_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """As Backend.generate; the ends come when the server has told the counts."""
        path, prompt = self._prompt(decode_text(token_ids))
        body = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **prompt,
            **request_fields(sampling, chat=self._chat),
        }
        samples = Samples(token_ids, sampling)
        async for event in self._http.events(path, body):
            for output in samples.take(event):
                yield output
        for output in samples.ends():
            yield output

    async def score_row(
        self, token_ids: Sequence[int], choice: Sequence[int], *, kv: KVParams, group_id: str
    ) -> list[float]:
        """As Scoring.score_row, by the echo of the prompt with its logprobs."""
        prompt, chosen = decode_text(token_ids), decode_text(choice)
        body = {
            "model": self._model,
            "prompt": prompt + chosen,
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": 1,
        }
        reply = await self._http.post("/completions", body)
        logprobs = own_tokens(reply, len(prompt), len(prompt) + len(chosen))
        if not logprobs:
            raise UnsupportedError(self, "select or score", "the server echoes no logprobs")
        return logprobs

    async def abort(self, group_id: str) -> None:
        """Nothing to tell: a closed connection ends its request."""

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    def _prompt(self, text: str) -> tuple[str, dict[str, Any]]:
        if not self._chat:
            return "/completions", {"prompt": text}
        messages, opened = messages_of(text)
        if opened is None or opened["role"] != "assistant":
            raise UnsupportedError(self, "gen outside of an assistant message", "open one first")
        if not opened["content"]:
            return "/chat/completions", {"messages": messages}
        if not self._continues:
            raise UnsupportedError(
                self, "text before a gen in its message", "give continues=True if the server can"
            )
        begun = {"continue_final_message": True, "add_generation_prompt": False}
        return "/chat/completions", {"messages": [*messages, opened], **begun}


def _checked(extensions: Iterable[str]) -> set[str]:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    chosen = set(extensions)
    for name in sorted(chosen):
        if name not in names:
            raise ValueError(f"extensions: {name!r} is no sampling field")
        if name in UNREAD:
            raise ValueError(f"extensions: {name!r} is not read back from such a server")
    return chosen
