"""What the isolation tests share: a server of several clients in this process, each with its key.

Knows nothing of what is kept apart.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

import httpx2
import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server.app import create_app
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.service import Service

SCRIPT = Path(__file__).parent.parent / "frontend" / "scripted_engine.py"
KEYS = ("key-of-anna-0123456789", "key-of-bert-0123456789", "key-of-cleo-0123456789")
ADMIN_KEY = "key-of-the-operator-0123456789"
TIME_LIMIT_S = 120


def bearer(key):
    return {} if key is None else {"authorization": f"Bearer {key}"}


class Caller:
    """One client with its key."""

    def __init__(self, http, key):
        self._http, self._headers = http, bearer(key)

    async def get(self, path, **options):
        return await self._http.get(path, headers=self._headers, **options)

    async def post(self, path, body=None, **options):
        return await self._http.post(path, json=body, headers=self._headers, **options)

    async def generate(self, ids, *, max_tokens=4, sampling=None, **fields):
        """One greedy sample of /generate, which must be an answer."""
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": {**params, **(sampling or {})}}
        response = await self.post("/generate", {**body, **fields})
        assert response.status_code == 200, response.text
        return response.json()


class SharedServer:
    """A server in this process; its callers speak to it without a socket."""

    def __init__(self, service):
        self.service = service
        transport = httpx2.ASGITransport(app=create_app(service), client=("10.0.0.1", 1))
        self.http = httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=TIME_LIMIT_S
        )
        self.anna, self.bert, self.cleo = (self.caller(key) for key in KEYS)
        self.operator, self.nobody = self.caller(ADMIN_KEY), self.caller(None)

    def caller(self, key):
        return Caller(self.http, key)

    async def stats(self):
        return await self.service.llm.stats()

    async def settle(self, wanted):
        """Wait until as many requests run or wait."""
        while len(self.service.records) != wanted:
            await asyncio.sleep(0.005)


def _run(use, config, command, options):
    async def start_engine():
        return await AsyncLLM.start(config, command=command)

    async def work():
        settings = {"api_keys": KEYS, "admin_key": ADMIN_KEY, **options}
        num_rows = config.scheduler.max_running
        service = Service(ServerConfig(**settings), start_engine, num_rows=num_rows)
        server = SharedServer(service)
        try:
            await service.start()
            return await use(server)
        finally:
            await service.drain()
            await server.http.aclose()

    return asyncio.run(asyncio.wait_for(work(), TIME_LIMIT_S))


@pytest.fixture
def with_server():
    """Runs `await use(server)` in front of the scripted engine; options are ServerConfig's."""
    import zipage_lang

    model = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
    command = [sys.executable, str(SCRIPT), str(model)]
    return lambda use, **options: _run(use, EngineConfig(), command, options)


@pytest.fixture(scope="session")
def with_real_server():
    """The same in front of the tiny reasoner; `engine` are EngineConfig's options."""

    def run(use, *, engine=(), **options):
        defaults = {"model": "zipage-tiny-reasoner", "num_threads": 1, "num_blocks": 512}
        config = EngineConfig.from_options(**{**defaults, **dict(engine)})
        return _run(use, config, None, options)

    return run


@pytest.fixture
def running():
    """`async with running(call)`: the call is under way inside, and over after."""

    @contextlib.asynccontextmanager
    async def run(call):
        task = asyncio.ensure_future(call)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return run
