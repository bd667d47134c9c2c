"""What the server's tests share: an app in this process, a server in a process of its own.

Both stand in front of the scripted engine of the frontend's tests, or of a real one.
Knows nothing of what the routes answer.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server.app import create_app
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.service import Service

TESTS = Path(__file__).parent.parent
SCRIPT = TESTS / "frontend" / "scripted_engine.py"
PROGRAM = Path(__file__).parent / "server_program.py"
TIME_LIMIT_S = 60
START_LIMIT_S = 60


@pytest.fixture(scope="session")
def command():
    """Starts the scripted engine; its tokenizer is the tiny reasoner's."""
    import zipage_lang

    model = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
    return [sys.executable, str(SCRIPT), str(model)]


class App:
    """An app in this process: `client` speaks to it without a socket."""

    def __init__(self, service):
        self.service = service
        self.app = create_app(service)
        transport = httpx2.ASGITransport(app=self.app, client=("10.0.0.1", 1))
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, path, body, **options):
        return await self.client.post(path, json=body, **options)

    async def get(self, path, **options):
        return await self.client.get(path, **options)


@pytest.fixture
def with_app(command):
    """Runs `await use(app)` on a fresh service in front of the scripted engine."""

    def run(use, *, engine=(), starts=True, num_rows=64, **options):
        async def start_engine():
            return await AsyncLLM.start(EngineConfig.from_options(**dict(engine)), command=command)

        async def work():
            service = Service(ServerConfig(**options), start_engine, num_rows=num_rows)
            try:
                if starts:
                    await service.start()
                return await use(App(service))
            finally:
                await service.drain()

        return asyncio.run(asyncio.wait_for(work(), TIME_LIMIT_S))

    return run


@pytest.fixture(scope="module")
def shared_app(command):
    """An app for the tests of a file that leave it as it was; its calls block."""

    async def start_engine():
        return await AsyncLLM.start(EngineConfig(), command=command)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(TIME_LIMIT_S)

    async def start():
        service = Service(ServerConfig(), start_engine)
        await service.start()
        return App(service)

    app = wait(start())
    yield BlockingApp(app, wait)
    wait(app.service.drain())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class BlockingApp:
    """An app whose calls block; `wait` runs a coroutine in its loop."""

    def __init__(self, app, wait):
        self.app, self.wait = app, wait
        self.service = app.service

    def request(self, method, path, **options):
        return self.wait(self.app.client.request(method, path, **options))

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, body, **options):
        return self.request("POST", path, json=body, **options)


class ServerProcess:
    """A server in a process of its own. `lines` is its log so far."""

    def __init__(self, *arguments):
        self.lines = []
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for_line(r"listening on (http://\S+);").group(1)

    @property
    def pid(self):
        return self._process.pid

    def wait_for_line(self, pattern):
        given_up_at = time.monotonic() + START_LIMIT_S
        while time.monotonic() < given_up_at:
            for line in list(self.lines):
                found = re.search(pattern, line)
                if found:
                    return found
            if self._process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no line {pattern!r} in:\n{''.join(self.lines)}")

    def wait_ready(self):
        self.wait_for_line(r"ready: \S+ at http")
        return self

    def signal(self, number=signal.SIGTERM):
        self._process.send_signal(number)

    def wait(self):
        """Its exit code."""
        code = self._process.wait(START_LIMIT_S)
        self._reader.join(5)
        return code

    def close(self):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _read(self):
        for line in self._process.stderr:
            self.lines.append(line)


@pytest.fixture
def start_server(command):
    """Starts servers with these ServerConfig fields, and ends them after the test."""
    with contextlib.ExitStack() as stack:

        def start(**options):
            server = ServerProcess(repr({"port": 0, **options}), repr(command), "{}")
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="module")
def scripted_server(command):
    """One server with the scripted engine for the tests of a file that leave it alive.

    It logs JSON, a line for each request too.
    """
    logs = {"log_format": "json", "log_requests": True}
    server = ServerProcess(repr({"port": 0, **logs}), repr(command), "{}")
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def real_server():
    """One server with the tiny reasoner for the tests of a file that leave it alive."""
    engine = {"model": "zipage-tiny-reasoner", "num_threads": 1, "kv_cache_memory": 0.05}
    server = ServerProcess(repr({"port": 0}), "None", repr(engine))
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def start_real_server():
    """Starts servers with a tiny reasoner each: EngineConfig options, ServerConfig fields."""
    with contextlib.ExitStack() as stack:

        def start(engine, **options):
            engine = {"model": "zipage-tiny-reasoner", "num_threads": 1, **engine}
            server = ServerProcess(repr({"port": 0, **options}), "None", repr(engine))
            stack.callback(server.close)
            return server.wait_ready()

        yield start
