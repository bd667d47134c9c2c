"""kill -9 of the engine, the server, clients: one error each, all comes back, nothing is left."""

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from zipage_lang.frontend.errors import EngineDiedError, ZipageError
from zipage_lang.runtime.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0)


def post(url, body, **options):
    return httpx2.post(f"{url}/generate", json=body, timeout=90, **options)


def events_of(url, body):
    """All that a stream says, to its end."""
    with httpx2.stream("POST", f"{url}/generate", json=body, timeout=90) as response:
        lines = [line for line in response.iter_lines() if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def in_threads(work, arguments):
    """Starts `work(argument)` for each; the results, once joined by calling what this returns."""
    results = {}

    def run(argument):
        results[argument] = work(argument)

    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()

    def join():
        for thread in threads:
            thread.join(90)
        return results

    return join


def left_behind():
    """What an engine's processes could leave: socket folders, shared memory, children."""
    return (
        set(Path(tempfile.gettempdir()).glob("zipage-*")),
        set(Path("/dev/shm").iterdir()),
        {child.pid for child in psutil.Process().children(recursive=True)},
    )


def test_each_request_of_a_killed_engine_has_one_error_and_new_ones_work(
    start_server, reasoner_options, until, record_property
):
    started = time.monotonic()
    server = start_server(reasoner_options).wait_ready()
    load_s = time.monotonic() - started
    prompt = {"text": "Q: 3+4=?\n", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    before = post(server.url, prompt).json()["output_ids"]
    endless = {
        "text": "Q: 3+4=?\n",
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        "stream": True,
    }
    join = in_threads(lambda index: events_of(server.url, endless), range(8))
    running = f"{server.url}/server_info"
    until(lambda: httpx2.get(running).json().get("num_running", 0) == 8, "eight streams")
    server.engine.kill()
    killed = time.monotonic()
    for events in join().values():
        errors = [event for event in events if "error" in event]
        assert errors == events[-1:], "exactly one error, and it is the last event"
        assert errors[0]["error"]["code"] == "engine_died"
        assert len(events) > 1
    until(lambda: httpx2.get(f"{server.url}/ready").status_code == 200, "the restart")
    recovery_s = time.monotonic() - killed
    assert post(server.url, prompt).json()["output_ids"] == before
    assert recovery_s < 2 * load_s + 5, "a restart takes what a start takes"
    record_property("load_s", load_s)
    record_property("recovery_s", recovery_s)
    print(f"\nload {load_s:.1f} s, recovered {recovery_s:.1f} s after the kill")


def test_a_killed_engine_of_a_program_leaves_errors_and_nothing_else(
    with_llm, reasoner_options, monkeypatch, tmp_path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = left_behind()

    async def use(llm):
        assert list(tmp_path.iterdir()) == [], "the sockets' folder goes once the engine is there"
        calls = [asyncio.ensure_future(llm.complete("Q: 1+1=?\n", LONG)) for _ in range(4)]
        while (await llm.stats())["num_running"] != 4:
            await asyncio.sleep(0.01)
        os.kill(llm.client.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        with pytest.raises(EngineDiedError):
            await llm.complete("Q: 1+1=?\n")
        return results

    results = with_llm(use, reasoner_options)
    assert [type(result) for result in results] == [EngineDiedError] * 4
    assert all("SIGKILL" in str(result) for result in results)
    assert left_behind() == before


async def _read_on(stream):
    async for _ in stream:
        pass


def test_a_stream_fails_once_and_is_over(with_llm, script):
    """Whoever asks again behind the error is not told a second one, and does not wait."""

    async def use(llm):
        stream = llm.client.add(llm._new_request([script.SLOW, 5], LONG)[0])
        await anext(stream)
        os.kill(llm.client.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            await _read_on(stream)
        llm.client._fail(EngineDiedError("again"))
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(stream), 5)

    with_llm(use)


def test_the_engine_ends_within_a_second_of_its_killed_server_and_the_port_is_free(
    start_server, until, is_over, reasoner_options
):
    server = start_server(reasoner_options).wait_ready()
    engine = server.engine
    server.process.kill()
    killed = time.monotonic()
    until(lambda: is_over(engine), "the orphan's end")
    assert time.monotonic() - killed < 1.0 + 2.0, "a second, and what a loaded machine adds"
    server.process.wait()
    second = start_server(port=server.port).wait_ready()
    assert post(second.url, {"input_ids": [30]}).json()["output_ids"][0] == 30


def test_an_engine_that_is_still_loading_ends_with_its_server(start_server, until, is_over):
    """It does not come to the loop that would look for its parent."""
    server = start_server({"model": "zipage-tiny-reasoner", "num_threads": 1})
    until(lambda: server.engine is not None, "the engine's start")
    engine = server.engine
    server.process.kill()
    until(lambda: is_over(engine), "the orphan's end")


SENDS_TO_NOBODY = """
import os, sys
from zipage_lang.runtime.orphan import end_with_parent
from zipage_lang.runtime.parent_line import ParentLine

end_with_parent(sys.argv[1])
line = ParentLine(sys.argv[1])
print("engine", os.getpid(), flush=True)
while True:
    line.send(bytes(1000))
"""

READS_NOTHING = """
import sys, tempfile, time
from zipage_lang.frontend.child_process import ChildProcess

folder = tempfile.mkdtemp()
print("folder", folder, flush=True)
ChildProcess([sys.executable, "-P", "-c", sys.argv[1], folder], lambda: None)
time.sleep(600)
"""


def test_an_engine_that_waits_in_send_ends_when_its_client_is_killed(start_program, until, is_over):
    """Its queue is full and nobody reads: it must not wait there for ever."""
    client = start_program("-c", READS_NOTHING, SENDS_TO_NOBODY)
    folder = Path(client.wait_for_line(r"folder (\S+)").group(1))
    engine = psutil.Process(int(client.wait_for_line(r"engine (\d+)").group(1)))
    used = [-1.0]

    def is_blocked():
        used.append(engine.cpu_times().user)
        time.sleep(0.3)
        return used[-1] == used[-2] and engine.status() == psutil.STATUS_SLEEPING

    until(is_blocked, "a full queue")
    client.process.kill()
    until(lambda: is_over(engine), "the orphan's end")
    assert not folder.exists(), "the folder of its sockets goes with it"


def test_the_blocks_of_killed_http_clients_come_back(
    start_server, start_program, reasoner_options, until
):
    server = start_server(reasoner_options).wait_ready()
    body = {
        "text": "Q: 3+4=?\n",
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        "stream": True,
    }
    code = f"import httpx2; httpx2.post({server.url + '/generate'!r}, json={body!r}, timeout=90)"

    def info():
        return httpx2.get(f"{server.url}/server_info").json()

    before = info()
    clients = [start_program("-c", code) for _ in range(3)]

    until(lambda: info()["num_running"] == 3, "three streams")
    for client in clients:
        client.process.kill()
    until(lambda: info()["num_running"] == 0, "three aborts")
    httpx2.post(f"{server.url}/flush_cache")
    after = info()
    assert after["num_aborted"] == 3
    assert after["num_free"] == before["num_free"], after


DIES_LATER = """
import pathlib, runpy, sys
count = pathlib.Path(sys.argv[1]); script = sys.argv[2]
starts = count.read_text() if count.exists() else ""
count.write_text(starts + "x")
if starts:
    sys.exit("no weights today")
sys.argv = [script, *sys.argv[3:]]
runpy.run_path(script, run_name="__main__")
"""


def test_an_engine_that_dies_at_each_restart_is_given_up_after_three(
    start_server, command, tmp_path, until, script
):
    count = tmp_path / "starts"
    own_command = [sys.executable, "-c", DIES_LATER, str(count), *command[1:]]
    server = start_server(engine_command=own_command).wait_ready()
    server.engine.kill()
    until(lambda: httpx2.get(f"{server.url}/health").status_code == 503, "the end of trying")
    assert httpx2.get(f"{server.url}/ready").status_code == 503
    answer = post(server.url, {"input_ids": [30]})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "dead"
    server.wait_for_line("died 3 times within .* no weights today|given up")
    assert len(count.read_text()) == 3
    process = psutil.Process(server.pid)
    used = process.cpu_times().user
    time.sleep(1)
    assert process.cpu_times().user - used < 0.5, "it does not spin"
    assert len(count.read_text()) == 3


ABANDONED = """
import asyncio, gc, sys
from zipage_lang.frontend.client import EngineClient
from zipage_lang.runtime.config import EngineConfig

async def work():
    client = await EngineClient.start(EngineConfig(), command=sys.argv[1:])
    client.me = client  # garbage that only the collector finds
    raise KeyError("the program has an error")

try:
    asyncio.run(work())
except KeyError:
    pass
gc.collect()
print("went on")
"""


def test_a_client_that_is_never_closed_does_not_hold_up_the_garbage_collector(
    start_program, command
):
    start_program("-c", ABANDONED, *command).wait_for_line("went on")


def test_errors_of_a_dead_engine_are_of_the_kind_that_may_be_tried_again():
    assert EngineDiedError("x").retryable
    assert issubclass(EngineDiedError, ZipageError)
