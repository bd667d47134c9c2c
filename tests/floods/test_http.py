"""Floods and edges at the server: a status that says whose fault it is, and others are served.

Knows nothing of how the server is built.
"""

import asyncio
import json
import resource
import socket
import threading

import httpx2
import pytest
import uvicorn

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server import http_protocol
from zipage_lang.server.app import create_app
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.http_protocol import BoundedHttp
from zipage_lang.server.service import Service

CONTEXT = 128
NUM_SILENT = 1_000


@pytest.fixture(scope="module")
def post():
    """Posts to an app in front of a real engine; several bodies at once."""
    options = {
        "model": "zipage-tiny-reasoner",
        "backend": "cpu",
        "num_threads": 1,
        "max_model_len": CONTEXT,
        "num_blocks": 200,
    }
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(300)

    async def start():
        async def start_engine():
            return await AsyncLLM.start(EngineConfig.from_options(**options))

        service = Service(ServerConfig(max_waiting=1024), start_engine)
        await service.start()
        transport = httpx2.ASGITransport(app=create_app(service))
        client = httpx2.AsyncClient(
            transport=transport,
            base_url="http://localhost",
            headers={"content-type": "application/json"},
            timeout=280,
        )
        return service, client

    service, client = wait(start())

    async def send(bodies, path):
        return await asyncio.gather(*(client.post(path, content=body) for body in bodies))

    def post_all(*bodies, path="/v1/completions"):
        texts = [body if isinstance(body, (str, bytes)) else json.dumps(body) for body in bodies]
        return wait(send(texts, path))

    yield post_all
    wait(service.drain())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def body(prompt_len=3, **fields):
    return {"prompt": [5] * prompt_len, "max_tokens": 4, "ignore_eos": True, **fields}


def error_of(answer):
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_tokens"),
    [(126, 2, 2), (127, 1, 1), (126, 1, 1), (128, 1, None), (129, 1, None)],
)
def test_prompts_around_the_context_are_served_or_refused(post, prompt_len, max_tokens, num_tokens):
    (answer,) = post(body(prompt_len, max_tokens=max_tokens))
    if num_tokens is None:
        assert answer.status_code == 400
        assert "maximum context length is 128 tokens" in error_of(answer)
        assert f"the prompt has {prompt_len} and" in error_of(answer)
    else:
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("max_tokens", [29, 10_000, 2**31 - 1, 2**31, 10**30])
def test_more_output_than_the_context_has_room_for_is_told(post, max_tokens):
    """Whoever asks for no number gets what is left."""
    bad, most, open_end = post(
        body(100, max_tokens=max_tokens),
        body(100, max_tokens=28),
        {**body(100), "max_tokens": None},
    )
    assert bad.status_code == 400
    assert "maximum context length is 128 tokens" in error_of(bad) or "max_tokens" in error_of(bad)
    assert most.json()["usage"]["completion_tokens"] == 28
    assert open_end.status_code == 200


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": [f"s{n}" for n in range(10_001)]}, "stop has 10001 strings; at most 10000"),
        ({"stop": ["a" * 100_000]}, "stop has 100000 characters in all; at most 65536"),
        ({"stop_token_ids": list(range(100)) * 20}, "stop_token_ids has 2000 tokens"),
        ({"regex": "a" * 1_000_000}, "regex has 1000000 bytes; at most 65536"),
        ({"regex": "(" * 70 + ")" * 70}, "nests more than 64"),
        ({"ebnf": "root ::= x"}, 'Rule "x" is not defined'),
        ({"json_schema": {"enum": list(range(20_000))}}, "bytes; at most 65536"),
    ],
)
def test_what_would_take_too_much_is_the_callers_error(post, fields, told):
    bad, good = post({**body(), "ignore_eos": False, **fields}, body())
    assert bad.status_code == 400
    assert told in error_of(bad)
    assert good.status_code == 200


def test_a_thousand_stop_strings_are_looked_for(post):
    stops = [f"<never {number}>" for number in range(1_000)]
    (plain, with_stops) = post(body(max_tokens=20, seed=1), body(max_tokens=20, seed=1, stop=stops))
    assert with_stops.status_code == 200
    assert with_stops.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]


def test_a_schema_of_ten_thousand_levels_is_the_callers_error(post):
    deep = '{"a":' * 10_000 + "1" + "}" * 10_000
    whole = '{"prompt": [5], "max_tokens": 2, "json_schema": ' + deep + "}"
    bad, good = post(whole, body())
    assert bad.status_code in (400, 413, 422), bad.text
    assert good.status_code == 200


def test_hostile_grammars_are_errors_and_others_are_served_beside_them(post):
    hostile = [
        {"lark": "start: " + " ".join('"x"~1..9999' for _ in range(500))},
        {"ebnf": 'root ::= root root root | root root | "1" | "2" | ""', "max_tokens": 60},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}},
    ]
    bodies = [{**body(), "ignore_eos": False, **grammar} for grammar in hostile]
    answers = post(*bodies, *(body(seed=number) for number in range(10)))
    assert {answer.status_code for answer in answers[: len(hostile)]} <= {200, 400, 500}
    assert answers[0].status_code != 200
    assert {answer.status_code for answer in answers[len(hostile) :]} == {200}


def test_128_samples_come_one_choice_each(post):
    (answer,) = post(body(n=128, max_tokens=2, temperature=1.0, seed=1))
    assert answer.status_code == 200
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(128))


def test_bodies_over_the_limit_are_refused_and_one_within_it_is_read(post):
    over, within, good = post(
        body(user="u" * (17 * 2**20)), {**body(), "prompt": "x" * (15 * 2**20)}, body()
    )
    assert over.status_code == 413
    assert within.status_code == 400
    assert f"the text has {15 * 2**20} characters" in error_of(within)
    assert good.status_code == 200


async def answer_ok(scope, receive, send):
    while (await receive()).get("more_body"):
        continue
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


def test_a_thousand_connections_that_say_nothing_are_closed_and_hold_nobody_up(monkeypatch):
    """Half say nothing at all, half begin a head; while they stand, another client is answered."""
    monkeypatch.setattr(http_protocol, "STALL_S", 3.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * NUM_SILENT)), hard))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2_048)
    address = listener.getsockname()
    config = uvicorn.Config(answer_ok, http=BoundedHttp, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    silent = []
    try:
        for number in range(NUM_SILENT):
            silent.append(socket.create_connection(address, timeout=30))
            if number % 2:
                silent[-1].sendall(b"GET / HTTP/1.1\r\nhost: ")
        answer = httpx2.get(f"http://127.0.0.1:{address[1]}/", timeout=30)
        assert answer.text == "ok"
        assert [connection.recv(1000) for connection in silent] == [b""] * NUM_SILENT
        assert httpx2.get(f"http://127.0.0.1:{address[1]}/", timeout=30).text == "ok"
        assert len(server.server_state.connections) <= 2
    finally:
        for connection in silent:
            connection.close()
        server.should_exit = True
        thread.join(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
