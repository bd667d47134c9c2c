"""A server in a process of its own: signals, clients that leave, logs. Over real sockets."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx2
import psutil
import pytest

from zipage_lang.frontend.errors import EngineStartError
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.run import listen, serve

TIME_LIMIT_S = 30


def until(condition):
    given_up_at = time.monotonic() + TIME_LIMIT_S
    while not condition():
        assert time.monotonic() < given_up_at, "it did not happen in time"
        time.sleep(0.02)


def engine_of(server):
    """The engine's process."""
    (engine,) = psutil.Process(server.pid).children()
    return engine


def is_over(process):
    """A zombie is: an orphan's end may be waited for by nobody."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def stats(url):
    return httpx2.get(f"{url}/server_info").json()


def stream(url, body, **options):
    return httpx2.stream("POST", f"{url}/generate", json={**body, "stream": True}, **options)


def events_of(response):
    lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def slow(script, max_tokens):
    return {"input_ids": [script.SLOW, 30], "sampling_params": {"max_tokens": max_tokens}}


def test_sigterm_lets_those_who_run_finish_and_ends_with_0(start_server, script):
    server = start_server().wait_ready()
    engine = engine_of(server)
    with stream(server.url, slow(script, 100)) as response:
        server.signal(signal.SIGTERM)
        events = events_of(response)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert len(events) == 100
    assert server.wait() == 0
    until(lambda: is_over(engine))
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(server.url)


def test_who_is_too_slow_for_the_drain_is_aborted_with_a_proper_end(start_server, script):
    server = start_server(drain_timeout=0.3).wait_ready()
    with stream(server.url, slow(script, 10**6)) as response:
        server.signal(signal.SIGINT)
        events = events_of(response)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.wait() == 0


def test_a_second_signal_ends_all_at_once(start_server, script):
    server = start_server().wait_ready()
    engine = engine_of(server)
    with stream(server.url, slow(script, 10**6)):
        server.signal()
        server.wait_for_line("draining: 1 requests")
        server.signal()
        assert server.wait() == -signal.SIGTERM
    until(lambda: is_over(engine))


def test_a_signal_while_the_engine_starts_ends_with_0(start_server):
    server = start_server()
    server.signal()
    assert server.wait() == 0


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_is_killed_is_aborted(scripted_server, script, streams):
    """The client is a process of its own, which can't say goodbye."""
    url = scripted_server.url
    num_before = stats(url).get("Abort", 0)
    body = json.dumps({**slow(script, 10**6), "stream": streams})
    code = f"import httpx2; httpx2.post({url + '/generate'!r}, content={body!r}, timeout=60,"
    code += "headers={'content-type': 'application/json'})"
    client = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: stats(url)["running"] == 1)
    finally:
        client.kill()
        client.wait()
    until(lambda: stats(url)["running"] == 0)
    assert stats(url)["Abort"] == num_before + 1


def test_connections_are_kept_and_used_again(scripted_server):
    with httpx2.Client(base_url=scripted_server.url) as client:
        ports = set()
        for streams in (False, True, False, True):
            response = client.post("/generate", json={"input_ids": [30], "stream": streams})
            assert response.status_code == 200
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr")[1])
    assert len(ports) == 1


def test_a_client_that_leaves_while_it_sends_is_no_error(scripted_server):
    num_lines = len(scripted_server.lines)
    host, port = scripted_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    assert httpx2.get(f"{scripted_server.url}/health").status_code == 200
    lines = [json.loads(line) for line in scripted_server.lines[num_lines:]]
    assert not [line for line in lines if line["level"] in ("error", "critical")]


def test_an_engine_that_is_killed_comes_back_behind_the_same_server(scripted_server, script):
    server = scripted_server
    with stream(server.url, slow(script, 10**6)) as response:
        engine_of(server).send_signal(signal.SIGKILL)
        events = events_of(response)
    assert events[-1]["error"]["code"] == "engine_died"
    server.wait_for_line("the engine is back")
    answer = httpx2.post(f"{server.url}/generate", json={"input_ids": [30, 31]})
    assert answer.json()["output_ids"] == [30, 31, script.EOS]


def test_log_lines_may_be_json_with_request_ids(scripted_server):
    url = scripted_server.url
    httpx2.get(f"{url}/version", headers={"x-request-id": "call-9"})
    scripted_server.wait_for_line('"call-9"')
    lines = [json.loads(line) for line in scripted_server.lines]
    (line,) = [line for line in lines if line["request_id"] == "call-9"]
    assert (line["logger"], line["level"]) == ("zipage.access", "info")
    assert (line["method"], line["path"], line["status"]) == ("GET", "/version", 200)


def test_an_engine_that_does_not_start_is_raised(command):
    config = EngineConfig.from_options(model="fails")
    with pytest.raises(EngineStartError, match="model 'fails' is not known"):
        serve(config, ServerConfig(port=0), engine_command=command)


def test_a_port_in_use_is_an_error_that_says_so():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"can't listen on 127.0.0.1:{port}: .* another port"):
            listen("127.0.0.1", port)


def test_a_host_that_is_none_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="host='no such host' is no address"):
        listen("no such host", 0)


def test_no_process_is_left_behind_by_a_killed_server(start_server):
    server = start_server().wait_ready()
    engine = engine_of(server)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: is_over(engine))
