"""The engine as a process: ZMQ in, ZMQ out, one thread.

Started as `python -m zipage_lang.runtime.engine_process SOCKET_DIR CONFIG_JSON` by the client,
which has bound two ipc sockets in that private directory. Ends on Shutdown or with its parent.
Knows nothing of scheduling or tensors.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator

import msgspec
import zmq

from zipage_lang.kernels.setup_error import SetupError
from zipage_lang.runtime import messages
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.garbage import calm_garbage_collector
from zipage_lang.runtime.start_progress import told_progress

IDLE_POLL_MS = 200  # how often an idle engine looks whether its parent still lives

log = logging.getLogger("zipage.engine")


class EngineProcess:
    """The loop: receive -> step -> send."""

    def __init__(
        self,
        engine: Engine,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        parent_pid: int,
    ) -> None:
        self._engine, self._inbox, self._outbox = engine, inbox, outbox
        self._parent = parent_pid
        self._num_malformed = 0
        self._is_running = True

    def run(self) -> None:
        """Serve until told to stop or orphaned."""
        while self._is_running and os.getppid() == self._parent:
            if not self._engine.has_work:
                self._inbox.poll(IDLE_POLL_MS)
            for data in self._received():
                self._handle(data)
            outputs = self._engine.step()
            if outputs:
                self._send(messages.Outputs(items=outputs))

    def _received(self) -> Iterator[bytes]:
        while self._is_running:
            try:
                yield self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _handle(self, data: bytes) -> None:
        try:
            message = messages.decode_for_engine(data)
        except messages.MessageError as error:
            self._num_malformed += 1
            log.warning("dropped a malformed message: %s", error)
            return
        match message:
            case messages.Shutdown():
                self._is_running = False
            case messages.GetStats():
                self._reply(message.call_id)
            case messages.GetSnapshot():
                picture = self._engine.snapshot(message)
                self._send(messages.SnapshotReply(call_id=message.call_id, snapshot=picture))
            case messages.FlushCache():
                self._engine.scheduler.flush_cache()
                self._reply(message.call_id)
            case _:
                self._engine.handle(message)

    def _reply(self, call_id: str) -> None:
        stats = {**self._engine.stats(), "num_malformed_messages": self._num_malformed}
        self._send(messages.StatsReply(call_id=call_id, stats=stats))

    def _send(self, message: messages.ToClient) -> None:
        self._outbox.send(messages.encode(message))


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    parent_pid = os.getppid()  # before the model loads: the parent may be gone when it has
    socket_dir, config_json = arguments
    logging.basicConfig(level=os.environ.get("ZIPAGE_LOG", "WARNING").upper(), stream=sys.stderr)
    config = msgspec.json.decode(config_json, type=EngineConfig)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
    inbox.connect(f"ipc://{socket_dir}/to_engine")
    outbox.connect(f"ipc://{socket_dir}/to_client")
    outbox.setsockopt(zmq.LINGER, 1000)
    try:
        engine = _start(config, outbox)
        if engine is None:
            return 1
        EngineProcess(engine, inbox, outbox, parent_pid).run()
    finally:
        inbox.close(0)
        outbox.close()
        context.term()
    return 0


def _start(config: EngineConfig, outbox: zmq.Socket[bytes]) -> Engine | None:
    """The engine, announced as ready; None when it could not start, and the client knows why."""
    try:
        with told_progress(lambda message: outbox.send(messages.encode(message))):
            engine = Engine(config)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if not isinstance(error, (ValueError, SetupError)):  # those are the user's to mend
            log.error("%s", traceback.format_exc())
        outbox.send(messages.encode(messages.Failed(error=str(error))))
        return None
    calm_garbage_collector()
    outbox.send(messages.encode(engine.ready))
    return engine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
