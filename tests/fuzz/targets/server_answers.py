"""What a server may say to our own clients: outputs, or a ServerError; never an error of ours.

Only a status, or an error's code, that blames the request makes a ValueError. Knows nothing of
sockets: the answers are handed to the HTTP library whole or in pieces.
"""

import asyncio
import functools
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import httpx2
from test_support.fuzz_input import Choices, words_of

from zipage_lang.commands import talkers
from zipage_lang.commands.talkers import ServerTalker
from zipage_lang.errors import ServerError, UnsupportedError
from zipage_lang.http_client import HttpClient
from zipage_lang.openai_backend import OpenAIBackend
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server_backend import ServerBackend

URL = "http://server"
LOOP = asyncio.new_event_loop()
DELTA = {
    "request_id": "r",
    "sample_index": 0,
    "text_delta": "a\u2028b",
    "token_ids": [1, 2],
    "logprobs": [[1, -0.5, 1, [[1, -0.5]]]],
    "finish_reason": "stop",
    "stop_reason": 2,
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "kv": {"resident_len": 5},
}
CHAT = {
    "id": "c",
    "choices": [{"index": 0, "delta": {"content": "a", "reasoning_content": "b"}}],
    "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}, "kv": {}},
}
COMPLETION = {
    "id": "c",
    "choices": [{"index": 1, "text": "\u0085a", "finish_reason": "length"}],
    "usage": None,
}
ECHO = {
    "choices": [
        {"logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "text_offset": [0, 1]}}
    ]
}
ERROR = {"error": {"message": "no", "code": 503}}
INFO = {"model": "m", "eos_token_ids": [2], "max_model_len": 64}
CARDS = {"data": [{"id": "m"}]}
WORDS = words_of(DELTA, CHAT, COMPLETION, ECHO, ERROR, INFO)
STATUSES = (200, 200, 200, 200, 204, 302, 400, 401, 422, 500, 503)
SAMPLING = SamplingParams(n=2)
ANSWERS: list[httpx2.Response] = []  # the one that is given next


class Pieces(httpx2.AsyncByteStream, httpx2.SyncByteStream):
    """An answer's bytes as they come."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self):
        return iter(self._pieces)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def target(data: bytes) -> None:
    choices = Choices(data)
    ask, template = choices.pick(ASKS)
    status, headers, body = answer(choices, template)
    pieces = [body] if choices.flag() else cut(choices, body)
    ANSWERS[:] = [httpx2.Response(status, headers=headers, stream=Pieces(pieces))]
    try:
        LOOP.run_until_complete(ask())
    except (ServerError, UnsupportedError) as error:
        assert str(error)
    except ValueError as error:
        assert type(error) is ValueError, error
        assert status in (400, 422) or b'"code"' in body, error


def answer(choices: Choices, template: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    status = choices.pick(STATUSES)
    lines = []
    for _ in range(1 + choices.below(4)):
        said = choices.pick((template, template, template, ERROR))
        made = json.dumps(choices.changed(said, WORDS), ensure_ascii=choices.flag())
        lead = choices.pick(("data: ", "data:", "", ": ", "event: x\ndata: "))
        lines.append(lead + made)
    if choices.flag():
        lines.append("data: [DONE]")
    end = choices.pick(("\n\n", "\r\n\r\n", "\r\r", "\n", ""))
    body = choices.damaged("".join(line + end for line in lines).encode("utf-8", "replace"))
    headers = {"content-type": choices.pick(("text/event-stream", "application/json", "?"))}
    if choices.below(6) == 5:
        headers["content-encoding"] = "gzip"
        body = choices.pick((body, gzip.compress(body), gzip.compress(body)[:-3]))
    return status, headers, body


def cut(choices: Choices, data: bytes) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = 1 + choices.below(40)
        pieces.append(data[at : at + size])
        at += size
    return pieces


@functools.cache
def http() -> HttpClient:
    """A client that is given ANSWERS in place of the network."""
    made = HttpClient(URL, api_key=None, timeout_s=5.0)
    made._options["transport"] = httpx2.MockTransport(lambda _: ANSWERS[0])
    made._client = httpx2.AsyncClient(**made._options)
    return made


@functools.cache
def server() -> ServerBackend:
    backend = ServerBackend.__new__(ServerBackend)
    backend._http, backend._info = http(), {}
    return backend


@functools.cache
def openai(chat: bool) -> OpenAIBackend:
    backend = OpenAIBackend("m", url=URL, chat=chat)
    backend._http = http()
    return backend


async def ask_info() -> None:
    assert isinstance(await server().server_info(), dict)


async def ask_server() -> None:
    outputs = server().generate([1, 2], SAMPLING, kv=KVParams(), group_id="g")
    text: dict[int, str] = {}
    async for output in outputs:
        text[output.sample_index] = text.get(output.sample_index, "") + output.text_delta
        assert output.text == text[output.sample_index]


async def ask_chat() -> None:
    backend = openai(chat=True)
    prompt = backend.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    await read_all(backend, backend.encode(prompt, add_special_tokens=False))


async def ask_completion() -> None:
    await read_all(openai(chat=False), [104, 105])


async def read_all(backend: OpenAIBackend, token_ids: list[int]) -> None:
    ends = 0
    async for output in backend.generate(token_ids, SAMPLING, kv=KVParams(), group_id="g"):
        assert output.token_ids == backend.encode(output.text, add_special_tokens=False)
        ends += output.is_final
    assert ends == SAMPLING.n


async def ask_scores() -> None:
    backend = openai(chat=False)
    assert await backend.score_row([97], [98], kv=KVParams(), group_id="g")


async def ask_cards() -> None:
    with mock.patch.object(talkers, "HttpClient", return_value=http()):
        talker = ServerTalker(URL, api_key=None, model=None, sampling=SAMPLING, think_len=None)
    assert isinstance(talker.name, str)


ASKS = (
    (ask_info, INFO),
    (ask_server, DELTA),
    (ask_chat, CHAT),
    (ask_completion, COMPLETION),
    (ask_scores, ECHO),
    (ask_cards, CARDS),
)
