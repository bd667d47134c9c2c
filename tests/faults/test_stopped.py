"""SIGSTOP: who is stopped for a while goes on, who is stopped for good is found out, replaced."""

import asyncio
import json
import os
import signal
import threading
import time

import httpx2
import psutil
import pytest

from zipage_lang.errors import ServerError
from zipage_lang.frontend.errors import EngineDiedError
from zipage_lang.frontend.pulse import Pulse
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server_backend import ServerBackend

STOP_S = 5.0


def events_of(url, body):
    with httpx2.stream("POST", f"{url}/generate", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def status(url, path):
    return httpx2.get(f"{url}{path}").status_code


def in_thread(work):
    """Starts `work()`; its result, once called."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()

    def join():
        thread.join(120)
        return results[0]

    return join


def test_streams_of_an_engine_stopped_for_five_seconds_go_on_and_lose_nothing(
    lasting_server, script, until
):
    server = lasting_server
    url = server.url
    body = {
        "input_ids": [script.SLOW, *range(20, 30)],
        "sampling_params": {"max_new_tokens": 400},
        "stream": True,
    }
    joins = [in_thread(lambda: events_of(url, body)) for _ in range(8)]
    until(lambda: httpx2.get(f"{url}/server_info").json()["running"] == 8, "eight streams")
    engine = server.engine
    engine.suspend()
    time.sleep(STOP_S)
    assert status(url, "/health") == 200, "the server runs, and its engine was not given up"
    assert server.engine.pid == engine.pid
    engine.resume()
    for join in joins:
        events = join()
        assert events[-1]["output_ids"] == [20 + index % 10 for index in range(400)]
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_an_engine_stopped_for_good_is_replaced_in_bounded_time(start_server, script, until):
    server = start_server(engine_timeout=4.0).wait_ready()
    url = server.url
    body = {"input_ids": [script.SLOW, 5], "sampling_params": {"max_new_tokens": 10**6}}
    joins = [in_thread(lambda: events_of(url, {**body, "stream": True})) for _ in range(4)]
    until(lambda: httpx2.get(f"{url}/server_info").json()["running"] == 4, "four streams")
    engine = server.engine
    stopped = time.monotonic()
    engine.suspend()
    until(lambda: status(url, "/ready") == 503, "no readiness")
    assert status(url, "/health") == 200
    for join in joins:
        errors = [event for event in join() if "error" in event]
        assert [error["error"]["code"] for error in errors] == ["engine_died"]
    until(lambda: status(url, "/ready") == 200, "the new engine")
    print(f"\nreplaced {time.monotonic() - stopped:.1f} s after the stop, timeout 4 s")
    assert not psutil.pid_exists(engine.pid)
    answer = httpx2.post(f"{url}/generate", json={"input_ids": [30, 31]}).json()
    assert answer["output_ids"] == [30, 31, script.EOS]
    assert "no sign of life for 4 s" in "".join(server.lines)


def test_a_program_hears_of_its_hanging_engine(with_llm, script):
    async def use(llm):
        calls = [asyncio.ensure_future(llm.complete([script.STALL])) for _ in range(3)]
        await asyncio.sleep(0)
        os.kill(llm.client.pid, signal.SIGSTOP)
        results = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineDiedError):
            await llm.stats()
        return results

    results = with_llm(use, engine_timeout_s=2)
    assert [type(result) for result in results] == [EngineDiedError] * 3
    assert "no sign of life for 2 s (engine_timeout)" in str(results[0])


def test_an_engine_that_has_nothing_to_do_gives_signs_of_life(with_llm, script):
    async def use(llm):
        await asyncio.sleep(3)
        return await llm.complete([30])

    assert with_llm(use, engine_timeout_s=2)[0].token_ids[0] == 30


STOPPED_PROGRAM = """
import asyncio, sys
from zipage_lang.frontend.client import EngineClient
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

async def work():
    client = await EngineClient.start(
        EngineConfig(), command=sys.argv[2:], engine_timeout_s=float(sys.argv[1]))
    request = AddRequest(
        request_id="r", token_ids=[906, 5], sampling=SamplingParams(max_tokens=300))
    print("runs", flush=True)
    tokens = [token async for output in client.add(request) for token in output.token_ids]
    print("tokens", len(tokens), flush=True)
    await client.close()

asyncio.run(work())
"""


def test_a_program_that_was_stopped_itself_does_not_take_its_engine_for_dead(
    start_program, command
):
    """Much time has passed, but it was not listening."""
    program = start_program("-c", STOPPED_PROGRAM, "2", *command)
    program.wait_for_line("runs")
    program.signal(signal.SIGSTOP)
    time.sleep(3)
    program.signal(signal.SIGCONT)
    assert program.wait_for_line(r"tokens (\d+)").group(1) == "300"


def test_a_pulse_counts_silent_beats_and_any_sign_begins_anew():
    asked = []

    async def work():
        pulse = Pulse(timeout_s=0.08)
        asking = asyncio.create_task(pulse.wait_for_silence(lambda: asked.append(1)))
        await asyncio.sleep(0.04)
        pulse.note()
        after_a_sign = pulse.silent_s
        await asyncio.wait_for(asking, 30)
        return after_a_sign, pulse.silent_s

    after_a_sign, at_the_end = asyncio.run(work())
    assert after_a_sign == 0
    assert at_the_end == pytest.approx(0.08)
    assert len(asked) >= 8


async def read(backend, token_ids, max_tokens):
    outputs = backend.generate(
        token_ids, SamplingParams(max_tokens=max_tokens), kv=KVParams(), group_id="g"
    )
    async for output in outputs:
        last = output
    return last


def call(backend, *arguments):
    return asyncio.run_coroutine_threadsafe(read(backend, *arguments), backend.loop).result(120)


def test_a_stopped_server_is_an_error_of_its_clients_and_may_be_tried_again(lasting_server):
    server = lasting_server
    backend = ServerBackend(server.url, timeout_s=1.0)
    assert call(backend, [30], 4).token_ids[0] == 30
    server.signal(signal.SIGSTOP)
    with pytest.raises(ServerError, match="no answer") as caught:
        call(backend, [30], 4)
    assert caught.value.retryable
    server.signal(signal.SIGCONT)
    assert call(backend, [30], 4).token_ids[0] == 30


@pytest.mark.slow
def test_a_server_stopped_for_a_moment_goes_on_where_it_was(lasting_server, script, until):
    server = lasting_server
    backend = ServerBackend(server.url)
    join = in_thread(lambda: call(backend, [script.SLOW, 5, 6], 500))
    until(lambda: httpx2.get(f"{server.url}/server_info").json()["running"] == 1, "the stream")
    server.signal(signal.SIGSTOP)
    time.sleep(1)
    server.signal(signal.SIGCONT)
    assert join().token_ids == [5, 6] * 250
