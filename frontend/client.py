"""The engine as seen from the caller's process: starts or joins it, watches it. Tokens only.

Knows nothing of text, tokenizers, sockets or how the engine decides.
"""

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from zipage_lang.frontend.child_link import ChildLink
from zipage_lang.frontend.engine_link import EngineLink
from zipage_lang.frontend.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineStartError,
    ZipageError,
)
from zipage_lang.frontend.pulse import Pulse
from zipage_lang.frontend.remote_link import RemoteLink
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
    Hello,
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
ENGINE_TIMEOUT_S = 300.0  # a step of a large model on a CPU may take minutes
SHUTDOWN_GRACE_S = 3.0
DRAIN_S = 0.05  # what the engine sent just before its end may still be on its way

logger = logging.getLogger(__name__)
Stats = dict[str, int | float | str]
Work = Callable[[], Coroutine[Any, Any, None]]


class EngineClient:
    """One engine and the only link to it. Belongs to the event loop that started or joined it.

    When the engine ends, or gives no sign of life for `engine_timeout_s`, whatever waits raises
    EngineDiedError, and later calls do so at once.
    """

    ready: Ready

    def __init__(
        self,
        link: EngineLink,
        *,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        on_progress: Callable[[Starting], None] = lambda _: None,
    ) -> None:
        self.num_malformed = 0  # engine messages that made no sense and were dropped
        self._link = link
        self._on_progress = on_progress
        self._engine_timeout_s = engine_timeout_s
        self._pulse = Pulse(engine_timeout_s)
        self._streams: dict[str, TokenStream] = {}
        self._num_leaving: dict[str, int] = {}  # samples without a reader, and still without an end
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._failure: ZipageError | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_ready = False
        self._ended = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._tasks = [
            self._begin(self._receive, "zipage-receive"),
            self._begin(self._watch, "zipage-watch"),
        ]

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        on_progress: Callable[[Starting], None] = lambda _: None,
    ) -> "EngineClient":
        """Spawn an engine and wait until it takes requests.

        `command` replaces the engine's own; socket folder and configuration are appended to it.
        `on_progress` hears what the engine is at meanwhile.
        Raises EngineStartError with the reason; nothing is left behind then.
        """
        link = ChildLink(command or ENGINE_COMMAND, config)
        client = cls(link, engine_timeout_s=engine_timeout_s, on_progress=on_progress)
        await client._wait_ready(start_timeout_s)
        return client

    @classmethod
    async def connect(
        cls,
        address: str,
        keys: str | Path,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
    ) -> "EngineClient":
        """Join an engine that was started elsewhere with `zipage engine run`, as its one client.

        `address`: tcp://host:port. `keys`: a folder with this client's keys and the engine's public
        one. Raises ValueError for an address or keys that won't do, EngineStartError where the
        engine can't be reached, refuses these keys, or has a client.
        """
        client = cls(RemoteLink(address, keys), engine_timeout_s=engine_timeout_s)
        client._send(Hello())
        await client._wait_ready(start_timeout_s)
        return client

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert isinstance(self._link, ChildLink), "the engine is not of this machine"
        return self._link.pid

    @property
    def table_sizes(self) -> dict[str, int]:
        """Entries of what is kept for requests and calls that have not ended, by name."""
        return {
            "client_streams": len(self._streams),
            "client_leaving": len(self._num_leaving),
            "client_calls": len(self._calls),
        }

    @property
    def silent_s(self) -> float:
        """How long the engine has given no sign of life: some seconds in a long step."""
        return self._pulse.silent_s

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
            # Also where its reader has left: what is still on its way must not reach another.
            if request.request_id in self._streams or request.request_id in self._num_leaving:
                raise ValueError(f"request_id={request.request_id!r} is in use; choose another")
        self._send(message)
        streams = [TokenStream(r.request_id, r.sampling.n, self._leave) for r in requests]
        self._streams.update((stream.request_id, stream) for stream in streams)
        return streams

    def _leave(self, request_id: str, num_running: int) -> None:
        self._streams.pop(request_id, None)
        if self._failure is None:
            self._num_leaving[request_id] = num_running
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
        self._link.send(message)

    # -- receiving -------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            try:
                message = await self._link.receive()
            except MessageError as error:
                self._drop(str(error))
            else:
                self._pulse.note()
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
            self._link.settle()
            self._tasks.append(self._begin(self._watch_pulse, "zipage-pulse"))

    def _dispatch_outputs(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                self._note_left(output)
                continue
            if not stream.put(output):
                self._drop(f"sample {output.sample_index} of {output.request_id} is not running")
            if stream.has_ended:
                del self._streams[output.request_id]

    def _note_left(self, output: TokenOutput) -> None:
        """What nobody reads any more; the engine may not have heard of it yet."""
        if output.is_final and output.request_id in self._num_leaving:
            self._num_leaving[output.request_id] -= 1
            if self._num_leaving[output.request_id] == 0:
                del self._num_leaving[output.request_id]

    def _drop(self, reason: str) -> None:
        self.num_malformed += 1
        if self.num_malformed & (self.num_malformed - 1) == 0:  # a flood is not to fill the log
            logger.warning(
                "dropped a malformed message of the engine (%d so far): %s",
                self.num_malformed,
                reason,
            )

    # -- the engine's life -----------------------------------------------------------------------

    def _begin(self, work: Work, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._guarded(work), name=name)

    async def _guarded(self, work: Work) -> None:
        """What must go on as long as the engine does. Should it fail, say in the caller's
        `on_progress`, nobody may wait for what is not taken in any more."""
        try:
            await work()
        except Exception as error:
            logger.exception("the client of an engine failed")
            self._fail(self._end_error(f"the engine's client failed: {error!r}"))
            self._link.cut()

    async def _wait_ready(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._started, timeout_s)
        except TimeoutError as error:
            await self.close()
            raise EngineStartError(f"the engine was not ready in {timeout_s:g} s") from error
        except BaseException:
            await self.close()
            raise

    async def _watch(self) -> None:
        reason = await self._link.wait_end()
        await asyncio.sleep(DRAIN_S)
        self._fail(self._end_error(reason))

    async def _watch_pulse(self) -> None:
        await self._pulse.wait_for_silence(self._ask_for_sign)
        silence = f"{self._engine_timeout_s:g} s (engine_timeout)"
        self._fail(EngineDiedError(f"the engine gave no sign of life for {silence}"))
        self._link.cut()

    def _ask_for_sign(self) -> None:
        if self._failure is None:
            self._link.send(GetStats(call_id=""))

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
        await self._link.end(SHUTDOWN_GRACE_S if is_running else 0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.close()


def _copy(error: ZipageError) -> ZipageError:
    """One exception per raise, so that tracebacks of different callers don't mix."""
    return type(error)(str(error))
