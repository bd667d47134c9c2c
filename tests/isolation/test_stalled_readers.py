"""Who takes nothing of its answer is let go of: what waits for it would fill the memory."""

import asyncio
import socket
import threading

import pytest
import uvicorn
from uvicorn.server import ServerState

from zipage_lang.server import http_protocol
from zipage_lang.server.http_protocol import BoundedHttp

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNK = b"x" * 2**16
LIMIT_S = 60


class Endless:
    """An app whose answers have no end, and who has left."""

    def __init__(self):
        self.has_left = threading.Event()

    async def __call__(self, scope, receive, send):
        leaving = asyncio.create_task(self._watch(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not leaving.done():
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            await asyncio.sleep(0)
        self.has_left.set()

    async def _watch(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.fixture
def endless():
    """The app and the port where it answers."""
    app = Endless()
    config = uvicorn.Config(app, http=BoundedHttp, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    yield app, listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(LIMIT_S)
    listener.close()


def test_who_takes_nothing_is_let_go_of(endless, monkeypatch):
    monkeypatch.setattr(http_protocol, "TAKE_S", 0.2)
    app, port = endless
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(REQUEST)
        assert app.has_left.wait(LIMIT_S)


class Transport(asyncio.Transport):
    """Of a connection to nobody; counts how often it was cut."""

    num_cut = 0

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return False

    def close(self):
        """Gives it up in peace."""

    def abort(self):
        self.num_cut += 1


@pytest.mark.parametrize(
    ("acts", "num_cut"),
    [
        (["pause_writing"], 1),
        (["pause_writing", "resume_writing"], 0),
        (["pause_writing", "resume_writing", "pause_writing"], 1),
        (["pause_writing", "connection_lost"], 0),
        ([], 0),
    ],
)
def test_what_is_taken_in_time_is_a_sign_of_life(monkeypatch, acts, num_cut):
    """The clock begins anew with each part of an answer that must wait."""
    monkeypatch.setattr(http_protocol, "TAKE_S", 0.0)

    async def work():
        config = uvicorn.Config(Endless(), log_config=None)
        config.load()
        protocol, transport = BoundedHttp(config, ServerState(), {}), Transport()
        protocol.connection_made(transport)
        for act in acts:
            getattr(protocol, act)(*([None] if act == "connection_lost" else []))
        for _ in range(5):
            await asyncio.sleep(0)
        num_cut = transport.num_cut
        if "connection_lost" not in acts:
            protocol.connection_lost(None)
        return num_cut

    assert asyncio.run(work()) == num_cut
