"""The service: who is let in, who is told, what becomes of a dying engine, how it drains."""

import asyncio

import pytest

from zipage_lang.frontend.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineStartError,
    RequestError,
)
from zipage_lang.runtime.constraint import UNSPELT
from zipage_lang.runtime.draws import NO_TOKEN
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server import supervisor
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.engine_errors import engine_errors
from zipage_lang.server.service import Service

LONG = SamplingParams(max_tokens=10_000)


class Watcher:
    """An observer that keeps all it is told."""

    def __init__(self):
        self.started, self.outputs, self.ended = [], [], []

    def on_start(self, record):
        self.started.append(record)

    def on_output(self, record, output):
        self.outputs.append(output)

    def on_end(self, record):
        self.ended.append(record)


async def until(condition, seconds=20):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def read(stream, num_outputs=10**9):
    outputs = []
    async for output in stream:
        outputs.append(output)
        if len(outputs) == num_outputs:
            break
    await stream.aclose()
    return outputs


def test_a_stream_and_a_completion_say_the_same_and_observers_hear_of_both(with_app):
    async def use(app):
        watcher = Watcher()
        app.service.observers.append(watcher)
        sampling = SamplingParams(max_tokens=3, n=2)
        streamed = await read(app.service.generate([5, 6, 7, 8], sampling, request_id="a"))
        whole = await app.service.complete([5, 6, 7, 8], sampling, request_id="b")
        return streamed, whole, watcher

    streamed, whole, watcher = with_app(use)
    last = {output.sample_index: output for output in streamed}
    assert [output.text for output in whole] == [last[0].text, last[1].text]
    assert watcher.outputs == streamed + whole
    assert [record.request_id for record in watcher.started] == ["a", "b"]
    for record in watcher.ended:
        assert (record.num_prompt_tokens, record.num_samples) == (4, 2)
        assert record.finish == "length"
        assert record.error is None
        assert record.created <= record.first_token_at <= record.last_output_at <= record.ended_at
        assert [record.outputs[index].finish_reason for index in (0, 1)] == ["length"] * 2


def test_a_record_knows_the_call_it_serves(with_app):
    async def use(app):
        watcher = Watcher()
        app.service.observers.append(watcher)
        await app.post("/generate", {"input_ids": [5, 6]}, headers={"x-request-id": "call-1"})
        return watcher.ended[0]

    record = with_app(use)
    assert record.http_request_id == "call-1"
    assert record.route == "/generate"
    assert record.client == "10.0.0.1"


def test_who_closes_a_stream_aborts_it(with_app, script):
    async def use(app):
        watcher = Watcher()
        app.service.observers.append(watcher)
        stream = app.service.generate([script.SLOW, 5], LONG, request_id="a")
        await read(stream, num_outputs=2)
        stats = await app.service.llm.stats()
        return watcher.ended[0], stats, app.service.records

    record, stats, records = with_app(use)
    assert record.finish == "abort"
    assert stats["running"] == 0
    assert stats["Abort"] == 1
    assert not records


def test_cancelling_a_completion_aborts_it(with_app, script):
    async def use(app):
        task = asyncio.create_task(app.service.complete([script.STALL], LONG, request_id="a"))
        await until(lambda: app.service.records)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await app.service.llm.stats(), app.service.records

    stats, records = with_app(use)
    assert stats["Abort"] == 1
    assert not records


def test_over_the_bound_of_samples_new_ones_are_told_to_come_back(with_app, script):
    async def use(app):
        both = SamplingParams(max_tokens=10_000, n=2)
        streams = [
            app.service.generate([script.SLOW, 5], both, request_id=f"r{i}") for i in range(2)
        ]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ApiError) as refused:
            await app.service.complete([5], SamplingParams(), request_id="c")
        await streams[0].aclose()
        after = await app.service.complete([5], SamplingParams(), request_id="d")
        await streams[1].aclose()
        return refused.value, after

    error, after = with_app(use, num_rows=2, max_waiting=1)
    assert (error.status, error.code) == (503, "overloaded")
    assert error.retry_after > 0
    assert after[0].finish_reason == "stop"


def test_what_the_engine_raises_has_the_status_that_fits():
    def told(error):
        with pytest.raises(ApiError) as raised, engine_errors():
            raise error
        return raised.value.status, raised.value.code

    waits = "9 requests wait already (max_waiting); try again later"
    assert told(RequestError("a", waits)) == (503, "overloaded")
    assert told(RequestError("a", "unknown kv policy 'x'")) == (400, None)
    assert told(RequestError("a", NO_TOKEN, has_run=True)) == (500, None)
    assert told(RequestError("a", UNSPELT, has_run=True)) == (400, "no_token_left")
    assert told(ValueError("top_p=7")) == (400, None)
    assert told(EngineDiedError("exit code 1")) == (503, "engine_died")
    assert told(EngineClosedError("closed")) == (503, "draining")


def test_nobody_is_let_in_before_the_engine_is_ready(with_app):
    async def use(app):
        return [
            await app.get("/ready"),
            await app.get("/health"),
            await app.post("/generate", {"input_ids": [5]}),
        ]

    ready, health, generate = with_app(use, starts=False)
    assert (ready.status_code, health.status_code) == (503, 200)
    assert generate.status_code == 503
    assert generate.json()["error"]["code"] == "starting"
    assert generate.headers["retry-after"] == "5"


def test_an_engine_that_does_not_start_is_told_to_who_starts_it(command):
    async def fails():
        raise EngineStartError("no such model")

    async def work():
        service = Service(ServerConfig(), fails)
        for _ in range(2):
            with pytest.raises(EngineStartError, match="no such model"):
                await service.start()
        return service.state, service.failure

    assert asyncio.run(work()) == ("dead", "no such model")


@pytest.fixture
def quick_restarts(monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.3, 0.01))


@pytest.mark.parametrize("streams", [True, False])
def test_a_dead_engine_fails_its_requests_and_comes_back(
    with_app, script, quick_restarts, caplog, streams
):
    async def use(app):
        service = app.service
        body = {"input_ids": [script.KILL, 5], "stream": streams}
        broken = asyncio.create_task(app.post("/generate", body))
        waiting = asyncio.create_task(app.post("/generate", {"input_ids": [script.STALL]}))
        await until(lambda: service.state == "starting")
        meanwhile = await app.post("/generate", {"input_ids": [5]})
        await until(lambda: service.state == "ready")
        after = await app.post("/generate", {"input_ids": [5, 6]})
        return await broken, await waiting, meanwhile, after, service

    broken, waiting, meanwhile, after, service = with_app(use)
    if streams:
        assert broken.status_code == 200
        assert '"code":"engine_died"' in broken.text
        assert broken.text.endswith("data: [DONE]\n\n")
    else:
        assert broken.status_code == 503
    assert waiting.status_code == 503
    assert waiting.json()["error"]["code"] == "engine_died"
    assert meanwhile.json()["error"]["code"] == "starting"
    assert after.status_code == 200
    assert service.num_restarts == 1
    assert "signal SIGKILL" in service.failure
    assert "the engine died" in caplog.text


def test_an_engine_that_dies_again_and_again_is_given_up(with_app, script, quick_restarts, caplog):
    async def use(app):
        service = app.service
        for _ in range(supervisor.MAX_DEATHS):
            await until(lambda: service.state == "ready")
            with pytest.raises(ApiError):
                await service.complete([script.KILL, 5], LONG, request_id="a")
            await until(lambda: service.state != "ready")
        return service.state, await app.get("/health"), await app.post("/generate", {"text": "a"})

    state, health, generate = with_app(use)
    assert state == "dead"
    assert health.status_code == 503
    assert generate.json()["error"]["code"] == "dead"
    assert "given up" in caplog.text


class DyingEngine:
    """As much of an engine as a supervisor sees: it has died already."""

    async def wait_end(self):
        return "exit code 1"

    async def close(self):
        pass


def test_no_error_of_a_start_leaves_a_server_starting_for_ever(quick_restarts, caplog):
    async def watched():
        starts = iter([DyingEngine()])

        async def start():
            engine = next(starts, None)
            if engine is None:
                raise RuntimeError("nobody thought of this")
            return engine

        watcher = supervisor.Supervisor(start)
        await watcher.start()
        await until(lambda: watcher.state == "dead")
        await watcher.close()
        return watcher.failure

    assert "nobody thought of this" in asyncio.run(watched())
    assert "not foreseen" in caplog.text


def test_a_drain_waits_for_those_who_run_and_lets_nobody_in(with_app, script):
    async def use(app):
        slow = SamplingParams(max_tokens=60)
        running = asyncio.create_task(app.service.complete([script.SLOW, 5], slow, request_id="a"))
        await until(lambda: app.service.records)
        drains = [asyncio.create_task(app.service.drain()) for _ in range(2)]
        await asyncio.sleep(0)
        refused = await app.post("/generate", {"input_ids": [5]})
        ready = await app.get("/ready")
        await asyncio.gather(*drains)
        return refused, ready, await running

    refused, ready, outputs = with_app(use)
    assert refused.json()["error"]["code"] == "draining"
    assert ready.status_code == 503
    assert outputs[0].finish_reason == "length"
    assert len(outputs[0].token_ids) == 60


def test_a_drain_aborts_who_does_not_finish_in_time(with_app, script):
    async def use(app):
        stream = app.service.generate([script.SLOW, 5], LONG, request_id="a")
        outputs = asyncio.create_task(read(stream))
        await until(lambda: app.service.records)
        await app.service.drain()
        return await outputs

    assert with_app(use, drain_timeout=0.2)[-1].finish_reason == "abort"
