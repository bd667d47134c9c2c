"""`serve`: the server as a program, from its first log line to the last request's end.

Knows nothing of flags or of what the routes do.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import uvicorn

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.garbage import calm_garbage_collector
from zipage_lang.runtime.messages import Starting
from zipage_lang.server.app import create_app
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.logs import logs_on_stderr
from zipage_lang.server.service import Service

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_GRACE_S = 10.0  # beyond the drain: for answers to reach clients, and the engine's end
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they are who closes them
BACKLOG = 2048

log = logging.getLogger("zipage.server")


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    engine_command: Sequence[str] | None = None,
    on_progress: Callable[[Starting], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A second signal ends all at once.

    `engine_command` as in AsyncLLM.start; `on_progress` hears what the engine is at while it
    starts, else the log does. Raises ValueError for a port that can't be had, and what the
    engine's first start raises.
    """
    report = on_progress or _StageLog().note

    async def start_engine() -> AsyncLLM:
        return await AsyncLLM.start(
            engine_config,
            command=engine_command,
            engine_timeout_s=server_config.engine_timeout,
            on_progress=report,
        )

    with (
        logs_on_stderr(server_config.log_format),
        listen(server_config.host, server_config.port) as listener,
    ):
        service = Service(server_config, start_engine, num_rows=engine_config.scheduler.max_running)
        for number, name in enumerate(service.tenants.names, 1):
            log.info("key %d is that of tenant %s", number, name)
        server = _Server(service, listener)
        server.run([listener])
    if server.failure is not None:
        raise server.failure


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ValueError that says what to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host={host!r} is no address to listen on: {error}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ValueError(f"can't listen on {host}:{port}: {reason}; choose another port") from error
    return listener


class _Server(uvicorn.Server):
    """Also watches the engine's first start, and drains when told to stop."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        config = uvicorn.Config(
            create_app(service),
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            http=_http_protocol(),
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(service.config.drain_timeout + CLOSE_GRACE_S),
        )
        super().__init__(config)
        self.failure: Exception | None = None
        self._service = service
        self._url = _url_of(listener)
        self._drain: asyncio.Task[None] | None = None

    async def main_loop(self) -> None:
        log.info("listening on %s; the engine is starting", self._url)
        watching = asyncio.create_task(self._watch_start(), name="zipage-watch-start")
        await super().main_loop()
        watching.cancel()
        # While answers are finished; the app's lifespan waits for the same drain.
        self._drain = asyncio.create_task(self._service.drain(), name="zipage-server-drain")

    async def _watch_start(self) -> None:
        try:
            await self._service.start()
        except Exception as error:
            self.failure = error
            self.should_exit = True
        else:
            calm_garbage_collector()
            log.info("ready: %s at %s", self._service.model_name, self._url)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own, does not raise the signal again at the end: to stop is no error."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # the second signal; the engine ends with its parent
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)
        self.should_exit = True


def _http_protocol() -> Any:
    """httptools where it is installed, which it is nowhere on Windows."""
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from zipage_lang.server.http_protocol import BoundedHttp

    return BoundedHttp


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _StageLog:
    """Logs what a starting engine is at, once per stage."""

    def __init__(self) -> None:
        self._stage = ""

    def note(self, progress: Starting) -> None:
        if progress.stage != self._stage:
            self._stage = progress.stage
            log.info("starting: %s", progress.stage)
