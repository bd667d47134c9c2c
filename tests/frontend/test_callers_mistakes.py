"""What a caller's own function raises while an engine starts is told, and leaves nothing behind."""

import asyncio
import os

import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.child_link import ChildLink
from zipage_lang.frontend.client import EngineClient
from zipage_lang.frontend.errors import EngineDiedError, EngineStartError
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

TIME_LIMIT_S = 30


@pytest.fixture
def links(monkeypatch):
    """Every link to an engine that is made."""
    made = []
    start = ChildLink.__init__

    def noting(self, *arguments):
        start(self, *arguments)
        made.append(self)

    monkeypatch.setattr(ChildLink, "__init__", noting)
    return made


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("stage", ["loading weights", "loading the tokenizer"])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError])
def test_a_function_that_hears_of_the_start_may_fail(command, links, stage, kind):
    def on_progress(starting):
        if starting.stage == stage:
            raise kind("the terminal is gone")

    async def work():
        start = AsyncLLM.start(EngineConfig(), command=command, on_progress=on_progress)
        with pytest.raises((EngineStartError, kind), match="the terminal is gone"):
            await asyncio.wait_for(start, TIME_LIMIT_S)

    asyncio.run(work())
    (link,) = links
    assert not is_there(link.pid)


def test_a_client_that_can_not_go_on_tells_all_who_wait(command, links, script):
    """Whatever it is: no one may wait for an answer that nobody takes in any more."""

    async def receive():
        raise OSError("too many open files")

    async def work():
        client = await EngineClient.start(EngineConfig(), command=command)
        try:
            request = AddRequest(
                request_id="a", token_ids=[script.SLOW, 30], sampling=SamplingParams(max_tokens=99)
            )
            stream = client.add(request)
            await anext(stream)
            links[0].receive = receive
            with pytest.raises(EngineDiedError, match="too many open files"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDiedError):
                await client.stats()
            return await client.wait_end()
        finally:
            await client.close()

    error = asyncio.run(asyncio.wait_for(work(), TIME_LIMIT_S))
    assert isinstance(error, EngineDiedError)
    assert not is_there(links[0].pid)
