"""What the tests of OpenAI's routes share: an app in front of the real small model, and an echo.

Knows nothing of what the routes answer.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server.app import create_app
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.service import Service

SCRIPT = Path(__file__).parents[2] / "frontend" / "scripted_engine.py"
TIME_LIMIT_S = 120
# The last message alone: the scripted engine says it again.
ECHO_TEMPLATE = (
    "{% if tools or enable_thinking %}{% endif %}"
    "{{ messages[-1].content }}{% if messages[-1].tool_calls %}"
    "{{ messages[-1].tool_calls[0].function.arguments | tojson }}{% endif %}"
)


class Api:
    """An app on an event loop of its own, called from outside of it."""

    def __init__(self, start_engine, **options):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._start(start_engine, options))

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIME_LIMIT_S)

    def post(self, path, **body):
        """The answer's JSON, which must be no error."""
        response = self.raw(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path, **body):
        """(status, error) of an answer that must be one."""
        response = self.raw(path, **body)
        assert response.status_code >= 400, response.text
        return response.status_code, response.json()["error"]

    def events(self, path, **body):
        """What a stream tells, without its [DONE]."""
        response = self.raw(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *lines, end = [line for line in response.text.split("\n\n") if line]
        assert end == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def raw(self, path, **body):
        return self.run(self.client.post(path, json=body))

    def get(self, path):
        return self.run(self.client.get(path))

    def close(self):
        self.run(self.service.drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIME_LIMIT_S)
        self._loop.close()

    async def _start(self, start_engine, options):
        self.service = Service(ServerConfig(**options), start_engine)
        await self.service.start()
        transport = httpx2.ASGITransport(app=create_app(self.service))
        self.client = httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        )


@pytest.fixture(scope="session")
def make_api():
    """Makes an Api of a function that starts an engine, and closes it in the end."""
    with contextlib.ExitStack() as stack:

        def make(start_engine, **options):
            api = Api(start_engine, **options)
            stack.callback(api.close)
            return api

        yield make


@pytest.fixture(scope="session")
def api(make_api):
    """The small instruct model behind the routes; tests leave it alive."""
    config = EngineConfig.from_options(model="smollm2-135m", num_threads=1, kv_cache_memory=0.2)
    return make_api(lambda: AsyncLLM.start(config))


@pytest.fixture(scope="session")
def echo(tmp_path_factory, make_api):
    """An engine that answers with the last message's text, a character a token."""
    import zipage_lang

    model = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
    folder = tmp_path_factory.mktemp("echo")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder)
    (folder / "chat_template.jinja").write_text(ECHO_TEMPLATE)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    command = [sys.executable, str(SCRIPT), str(folder)]
    config = EngineConfig()
    return make_api(lambda: AsyncLLM.start(config, command=command), strict_model=True)
