"""The load and overhead benchmarks, briefly: streams end properly and blocks return.

Knows nothing of how long things take.
"""

import sys

import pytest


@pytest.fixture(scope="module")
def server(benchmark_file):
    """The tiny reasoner on a pool that twelve streams can fill."""
    servers = benchmark_file("server_process")
    command = servers.serve_command(
        "zipage-tiny-reasoner", num_blocks=120, num_threads=1, max_running=12, drain_timeout=2
    )
    with servers.ServerProcess(command) as server:
        yield server.wait_ready()


def test_streams_end_properly_and_vanished_clients_leave_no_block_behind(server, benchmark_file):
    load = benchmark_file("server_load")
    result = load.measure(server, num_streams=12, seconds=0)  # each once
    assert not load.is_amiss(result), result
    assert result["num_ended"] == 12
    assert result["num_compactions"] > 0
    vanishing = result["vanishing"]
    assert (vanishing["num_left"], vanishing["num_stayed"]) == (6, 6)
    assert vanishing["num_aborted"] == 6


def test_a_server_that_does_not_start_is_not_left_behind(benchmark_file, monkeypatch):
    servers = benchmark_file("server_process")
    monkeypatch.setattr(servers, "START_LIMIT_S", 0.2)
    server = servers.ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    process = server.process
    with pytest.raises(AssertionError, match="no line"):
        server.__enter__()
    assert not process.is_running()


def test_a_stream_that_is_cut_short_is_noticed(benchmark_file):
    load = benchmark_file("server_load")
    stream = load.Stream(load.Ask([1], max_tokens=2), started=0.0)
    stream.take('{"choices": [{"text": "a", "finish_reason": null}]}')
    assert stream.fault == "no [DONE]"
    stream.take("[DONE]")
    assert stream.fault == "finish reasons []"
    stream.finish_reasons, stream.num_tokens = ["length"], 1
    assert stream.fault == "1 tokens in place of 2"
    stream.num_tokens = 2
    assert stream.fault == ""
    stream.take('{"error": {"message": "the engine died"}}')
    assert "the engine died" in stream.fault


def test_the_overhead_is_of_the_same_tokens_by_each_way(benchmark_file):
    """Counts alone: what it measures depends on the machine."""
    benchmark_file("server_load")
    overhead = benchmark_file("server_overhead")
    options = overhead.parse_arguments(
        ["--step-ms=1", "--rounds=1", "--tokens=30", "--streams=4", "--seconds=0"]
    )
    result = overhead.measure(options)
    ways = {"engine", overhead.COMPLETIONS, overhead.CHAT}
    assert set(result["one_stream"]) == set(result["cpu_us_per_token"]) == ways
    for told in result["one_stream"].values():
        assert set(told["delay_ms"]) == {"p50", "p90", "p99"}
        assert told["delay_ms"]["p50"] > 0  # no token arrives before it was sent
