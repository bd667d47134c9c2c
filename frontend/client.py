"""The engine as seen from the caller's process: starts it, watches it, speaks ZMQ. Tokens only.

Knows nothing of text, tokenizers or how the engine decides.
"""

import asyncio
import functools
import logging
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from zipage_lang.frontend.child_process import ChildProcess
from zipage_lang.frontend.engine_sockets import EngineSockets
from zipage_lang.frontend.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineStartError,
    ZipageError,
)
from zipage_lang.frontend.token_stream import TokenStream
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.messages import (
    Abort,
    AddRequest,
    Failed,
    FlushCache,
    Fork,
    GetSnapshot,
    GetStats,
    MessageError,
    Outputs,
    Ready,
    Release,
    Shutdown,
    SnapshotReply,
    Starting,
    StatsReply,
    Stop,
    ToClient,
    ToEngine,
    TokenOutput,
)
from zipage_lang.runtime.snapshot import Snapshot

# -P: the caller's folder must not shadow installed packages in the engine.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "zipage_lang.runtime.engine_process")
START_TIMEOUT_S = 900.0
SHUTDOWN_GRACE_S = 3.0
DRAIN_S = 0.05  # what the engine sent just before its end may still be on its way

logger = logging.getLogger(__name__)
Stats = dict[str, int | float | str]


class EngineClient:
    """One engine process and the only two sockets to it. Belongs to the event loop that started it.

    When the process ends, whatever waits raises EngineDiedError, and later calls do so at once.
    """

    ready: Ready

    def __init__(
        self,
        command: Sequence[str] = ENGINE_COMMAND,
        on_progress: Callable[[Starting], None] = lambda _: None,
    ) -> None:
        self.num_malformed = 0  # engine messages that made no sense and were dropped
        self._command = tuple(command)
        self._on_progress = on_progress
        self._streams: dict[str, TokenStream] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._failure: ZipageError | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_ready = False
        self._exited = asyncio.Event()
        self._ended = asyncio.Event()
        self._child: ChildProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._sockets = EngineSockets()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        on_progress: Callable[[Starting], None] = lambda _: None,
    ) -> "EngineClient":
        """Spawn an engine and wait until it takes requests.

        `command` replaces the engine's own; socket folder and configuration are appended to it.
        `on_progress` hears what the engine is at meanwhile.
        Raises EngineStartError with the reason; nothing is left behind then.
        """
        client = cls(command or ENGINE_COMMAND, on_progress)
        try:
            client._spawn(config)
            await asyncio.wait_for(client._started, start_timeout_s)
        except TimeoutError as error:
            await client.close()
            raise EngineStartError(f"the engine was not ready in {start_timeout_s:g} s") from error
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._child is not None, "the engine was not spawned"
        return self._child.pid

    def add(self, request: AddRequest) -> TokenStream:
        """Send a request; its outputs come from the stream returned."""
        return self._send_requests(request, [request])[0]

    def fork(self, fork: Fork) -> list[TokenStream]:
        """Start children from a parent's state; one stream per child, in order."""
        return self._send_requests(fork, fork.children)

    def stop(self, stop: Stop) -> None:
        """End one sample as finished. Its final output still arrives."""
        self._send(stop)

    def abort(self, request_ids: Iterable[str] = (), group_ids: Iterable[str] = ()) -> None:
        """End requests; their streams get a final output with finish_reason "abort"."""
        self._send(Abort(request_ids=list(request_ids), group_ids=list(group_ids)))

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop held states."""
        self._send(Release(request_ids=list(request_ids)))

    async def stats(self) -> Stats:
        """Counters and gauges of the engine."""
        stats: Stats = await self._call(GetStats(call_id=uuid.uuid4().hex))
        return stats

    async def snapshot(
        self, *, max_cells: int = 4096, max_nodes: int = 96, max_requests: int = 48
    ) -> Snapshot:
        """A picture of pool, tree and requests, each bounded; taken between two steps."""
        snapshot: Snapshot = await self._call(
            GetSnapshot(
                call_id=uuid.uuid4().hex,
                max_cells=max_cells,
                max_nodes=max_nodes,
                max_requests=max_requests,
            )
        )
        return snapshot

    async def flush_cache(self) -> Stats:
        """Evict all that no request holds; the stats after it."""
        stats: Stats = await self._call(FlushCache(call_id=uuid.uuid4().hex))
        return stats

    async def wait_end(self) -> ZipageError:
        """Wait until the engine is gone, died or closed; the error that everybody gets."""
        await self._ended.wait()
        assert self._failure is not None, "an engine ended without a cause"
        return _copy(self._failure)

    async def close(self) -> None:
        """End the engine and free everything. May be called again, and by several at once."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    # -- sending ---------------------------------------------------------------------------------

    def _send_requests(
        self, message: AddRequest | Fork, requests: list[AddRequest]
    ) -> list[TokenStream]:
        for request in requests:
            if request.request_id in self._streams:
                raise ValueError(f"request_id={request.request_id!r} is in use; choose another")
        self._send(message)
        streams = [TokenStream(r.request_id, r.sampling.n, self._leave) for r in requests]
        self._streams.update((stream.request_id, stream) for stream in streams)
        return streams

    def _leave(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if self._failure is None:
            self.abort([request_id])

    async def _call(self, message: GetStats | GetSnapshot | FlushCache) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(message)
        self._calls[message.call_id] = reply
        try:
            return await reply
        finally:
            del self._calls[message.call_id]

    def _send(self, message: ToEngine) -> None:
        """Queue a message; ZMQ keeps the order. Raises where it can't ever arrive."""
        if self._failure is not None:
            raise _copy(self._failure)
        self._sockets.send(message)

    # -- receiving -------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            try:
                message = await self._sockets.receive()
            except MessageError as error:
                self._drop(str(error))
            else:
                self._dispatch(message)

    def _dispatch(self, message: ToClient) -> None:
        match message:
            case Outputs(items=outputs):
                self._dispatch_outputs(outputs)
            case StatsReply(call_id=call_id, stats=stats):
                self._answer(call_id, stats)
            case SnapshotReply(call_id=call_id, snapshot=snapshot):
                self._answer(call_id, snapshot)
            case Starting():
                self._on_progress(message)
            case Ready():
                self._take_ready(message)
            case Failed(error=error):
                self._fail(self._end_error(error))

    def _answer(self, call_id: str, answer: Any) -> None:
        call = self._calls.get(call_id)
        if call is not None and not call.done():
            call.set_result(answer)

    def _take_ready(self, message: Ready) -> None:
        if not self._started.done():
            self.ready, self._is_ready = message, True
            self._started.set_result(None)

    def _dispatch_outputs(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its reader has left; the engine has not heard of it yet
            if not stream.put(output):
                self._drop(f"sample {output.sample_index} of {output.request_id} is not running")
            if stream.has_ended:
                del self._streams[output.request_id]

    def _drop(self, reason: str) -> None:
        self.num_malformed += 1
        logger.warning("dropped a malformed message of the engine: %s", reason)

    # -- the process's life ----------------------------------------------------------------------

    def _spawn(self, config: EngineConfig) -> None:
        arguments = [str(self._sockets.folder), msgspec.json.encode(config).decode()]
        loop = asyncio.get_running_loop()
        on_exit = functools.partial(_set_from_thread, loop, self._exited)
        try:
            self._child = ChildProcess([*self._command, *arguments], on_exit)
        except OSError as error:
            raise EngineStartError(f"the engine process could not be started: {error}") from error
        self._tasks = [
            asyncio.create_task(self._receive(), name="zipage-receive"),
            asyncio.create_task(self._watch(self._child), name="zipage-watch"),
        ]

    async def _watch(self, child: ChildProcess) -> None:
        await self._exited.wait()
        await asyncio.sleep(DRAIN_S)
        self._fail(self._end_error(f"the engine process {child.describe_end()}"))

    def _end_error(self, reason: str) -> ZipageError:
        return EngineDiedError(reason) if self._is_ready else EngineStartError(reason)

    def _fail(self, error: ZipageError) -> None:
        """Everybody who waits gets the error; the first cause is the one that is told."""
        if self._failure is not None:
            return
        self._failure = error
        self._ended.set()
        if not self._started.done():
            self._started.set_exception(_copy(error))
        for stream in self._streams.values():
            stream.fail(_copy(error))
        self._streams.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(_copy(error))

    async def _close(self) -> None:
        is_running = self._is_ready and self._failure is None
        if is_running:
            self._send(Shutdown())
        self._started.cancel()
        self._fail(EngineClosedError("the engine is closed; start a new one"))
        if self._child is not None:
            await self._end_child(self._child, SHUTDOWN_GRACE_S if is_running else 0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sockets.close()

    async def _end_child(self, child: ChildProcess, grace_s: float) -> None:
        try:
            await asyncio.wait_for(self._exited.wait(), grace_s)
        except TimeoutError:
            child.kill()
            await self._exited.wait()


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        return  # the loop was closed without close(): nobody is left to be told


def _copy(error: ZipageError) -> ZipageError:
    """One exception per raise, so that tracebacks of different callers don't mix."""
    return type(error)(str(error))
