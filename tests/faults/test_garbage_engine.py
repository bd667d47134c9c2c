"""An engine that sends garbage to its client: counted, dropped, and the right outputs arrive."""

import sys
from pathlib import Path

import psutil
import pytest

from zipage_lang.frontend.client import EngineClient
from zipage_lang.frontend.errors import EngineDiedError
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

GARBAGE = Path(__file__).with_name("garbage_engine.py")
ECHO = [5, 6, 7]


@pytest.fixture
def use_engine(with_llm, reasoner_folder, monkeypatch):
    """Runs `await use(llm)` on an engine that sends so many messages of a kind per request."""

    def run(num_messages, kind, use, **options):
        command = [sys.executable, str(GARBAGE), str(num_messages), kind, str(reasoner_folder)]
        start = EngineClient.start
        monkeypatch.setattr(
            EngineClient,
            "start",
            lambda *args, **more: start(*args, **{**more, "command": command}),
        )
        return with_llm(use, **options)

    return run


async def echoed(llm, request_id="r"):
    request = AddRequest(request_id=request_id, token_ids=ECHO, sampling=SamplingParams())
    return [token async for output in llm.client.add(request) for token in output.token_ids]


@pytest.mark.parametrize(
    ("kind", "num_messages"),
    [("bytes", 20_000), ("truncated", 1000), ("empty", 1000), ("frames", 1000)],
)
def test_garbage_is_counted_and_the_right_outputs_arrive(use_engine, script, kind, num_messages):
    async def use(llm):
        return await echoed(llm), llm.client.num_malformed

    tokens, num_malformed = use_engine(num_messages, kind, use)
    assert tokens == [*ECHO, script.EOS]
    assert num_malformed == num_messages


def test_a_flood_is_logged_in_a_few_lines(use_engine, caplog):
    use_engine(1000, "empty", echoed)
    lines = [record for record in caplog.records if "malformed" in record.getMessage()]
    assert len(lines) == 10  # the first, the second, the fourth, ..


def test_outputs_of_requests_that_nobody_made_are_nobodys(use_engine, script):
    async def use(llm):
        return await echoed(llm), llm.client._streams, llm.client._num_leaving

    tokens, streams, leaving = use_engine(1000, "strangers", use)
    assert tokens == [*ECHO, script.EOS]
    assert not streams
    assert not leaving


def test_a_gigabyte_costs_no_memory_and_the_caller_has_an_error_in_bounded_time(use_engine):
    """Refused at its header; nothing more can come through, so the engine is given up."""
    process = psutil.Process()

    async def use(llm):
        before = process.memory_info().rss
        with pytest.raises(EngineDiedError):
            await echoed(llm)
        return process.memory_info().rss - before

    assert use_engine(1, "gigabyte", use, engine_timeout_s=2) < 100 * 2**20


def test_nothing_that_was_on_its_way_reaches_the_next_request_of_that_id(with_llm, script):
    """Until the first one's end has come its id is in use, although its reader has left."""

    def request(token):
        return AddRequest(
            request_id="same",
            token_ids=[script.SLOW, token],
            sampling=SamplingParams(max_tokens=30),
        )

    async def use(llm):
        first = llm.client.add(request(5))
        await anext(first)
        first.close()
        with pytest.raises(ValueError, match="'same' is in use"):
            llm.client.add(request(6))
        await llm.stats()  # the first one's end comes before this answer
        return [token async for output in llm.client.add(request(6)) for token in output.token_ids]

    assert with_llm(use) == [6] * 30
