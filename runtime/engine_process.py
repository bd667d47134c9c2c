"""The engine as a process: messages in, messages out, one thread.

Started as `python -m zipage_lang.runtime.engine_process SOCKET_DIR CONFIG_JSON` by the client,
which has bound two ipc sockets in that private directory. Ends on Shutdown or with its parent.
Knows nothing of scheduling or tensors.
"""

import logging
import os
import sys
import time
import traceback

import msgspec

from zipage_lang.kernels.setup_error import SetupError
from zipage_lang.runtime import messages
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.garbage import calm_garbage_collector
from zipage_lang.runtime.line import Line, LineBrokenError
from zipage_lang.runtime.orphan import end_with_parent
from zipage_lang.runtime.parent_line import ParentLine
from zipage_lang.runtime.start_progress import told_progress

IDLE_POLL_MS = 200  # how long an idle engine waits at a time
TAKING_S = 0.02  # a step waits so long for messages (and the one begun), however many come

log = logging.getLogger("zipage.engine")


class EngineProcess:
    """The loop: receive -> step -> send."""

    def __init__(self, engine: Engine, line: Line) -> None:
        self._engine, self._line = engine, line
        self._num_malformed = 0
        self._is_running = True

    def run(self) -> None:
        """Serve until told to stop."""
        while self._is_running:
            if not self._engine.has_work:
                self._line.wait(IDLE_POLL_MS)
            self._take_messages()
            if self._line.take_departure():
                self._engine.forget_all()
            outputs = self._engine.step()
            if outputs:
                self._send_outputs(outputs)

    def stop(self) -> None:
        """End the loop after the step under way."""
        self._is_running = False

    def _take_messages(self) -> None:
        deadline = time.monotonic() + TAKING_S
        while self._is_running and (data := self._line.receive()) is not None:
            self._handle(data)
            if time.monotonic() > deadline:
                return

    def _handle(self, data: bytes) -> None:
        try:
            message = messages.decode_for_engine(data)
        except messages.MessageError as error:
            self._note_malformed(str(error))
            return
        try:
            self._act(message)
        except AssertionError:
            raise  # an invariant of ours: better to end than to go on wrong
        except Exception as error:  # nobody's message may end the engine for all others
            self._note_malformed(f"{type(message).__name__} that could not be handled: {error!r}")
            log.error("%s", traceback.format_exc())
            if isinstance(message, messages.AddRequest | messages.Fork):
                self._engine.refuse_lost(
                    message, f"the engine could not take it in: {error!r:.300}"
                )

    def _act(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Shutdown():
                self._is_running = False
            case messages.Hello():
                self._send(self._engine.ready)
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

    def _note_malformed(self, reason: str) -> None:
        self._num_malformed += 1
        if self._num_malformed & (self._num_malformed - 1) == 0:  # a flood is not to fill the log
            log.warning("dropped a malformed message (%d so far): %s", self._num_malformed, reason)

    def _reply(self, call_id: str) -> None:
        stats = {**self._engine.stats(), "num_malformed_messages": self._num_malformed}
        self._send(messages.StatsReply(call_id=call_id, stats=stats))

    def _send(self, message: messages.ToClient) -> None:
        self._line.send(messages.encode(message))

    def _send_outputs(self, outputs: list[messages.TokenOutput]) -> None:
        """In one message, or in as many as keep each within what a client takes."""
        data = messages.encode(messages.Outputs(items=outputs))
        if len(data) <= messages.MAX_MESSAGE_BYTES or len(outputs) == 1:
            self._line.send(data)
            return
        half = len(outputs) // 2
        self._send_outputs(outputs[:half])
        self._send_outputs(outputs[half:])


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    socket_dir, config_json = arguments
    end_with_parent(socket_dir)
    set_up_log()
    config = msgspec.json.decode(config_json, type=EngineConfig)
    line = ParentLine(socket_dir)
    try:
        engine = _start(config, line)
        if engine is None:
            return 1
        EngineProcess(engine, line).run()
    except LineBrokenError as error:
        log.error("the engine ends, as it lost its client: %s", error)
        return 1
    finally:
        line.close()
    return 0


def set_up_log() -> None:
    """Log lines on stderr; how many, the environment says."""
    logging.basicConfig(level=os.environ.get("ZIPAGE_LOG", "WARNING").upper(), stream=sys.stderr)


def _start(config: EngineConfig, line: Line) -> Engine | None:
    """The engine, announced as ready; None when it could not start, and the client knows why."""
    try:
        with told_progress(lambda message: line.send(messages.encode(message))):
            engine = Engine(config)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if not isinstance(error, (ValueError, SetupError)):  # those are the user's to mend
            log.error("%s", traceback.format_exc())
        line.send(messages.encode(messages.Failed(error=str(error))))
        return None
    calm_garbage_collector()
    line.send(messages.encode(engine.ready))
    return engine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
