"""The line to the process that started this engine: two ipc sockets in its private folder.

Knows nothing of what the messages mean.
"""

import zmq

from zipage_lang.runtime.line import MAX_QUEUED, NO_MESSAGE, LineBrokenError
from zipage_lang.runtime.messages import MAX_MESSAGE_BYTES

LINGER_MS = 1000


class ParentLine:
    """Connects to `to_engine` and `to_client`, which the parent has bound in `folder`.

    A parent that reads nothing for long blocks `send` once the queues are full: the engine waits
    with it. Whoever outlives its parent is ended by `orphan.end_with_parent`, in `send` too.

    A message that is too long cuts the connection at its header. It can't be made again, as the
    folder is gone by then, so the engine has to end: nobody would hear of it otherwise.
    """

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._inbox.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._outbox.setsockopt(zmq.LINGER, LINGER_MS)
        self._cuts = self._inbox.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._inbox.connect(f"ipc://{folder}/to_engine")
        self._outbox.connect(f"ipc://{folder}/to_client")

    def wait(self, timeout_ms: int) -> None:
        self._inbox.poll(timeout_ms)

    def receive(self) -> bytes | None:
        try:
            frames = self._inbox.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if self._cuts.poll(0):
                raise LineBrokenError(
                    f"its connection broke: a message of over {MAX_MESSAGE_BYTES} bytes, or its end"
                ) from None
            return None
        return frames[0] if len(frames) == 1 else NO_MESSAGE

    def send(self, data: bytes) -> None:
        self._outbox.send(data)

    def take_departure(self) -> bool:
        """Never: this process ends with its parent."""
        return False

    def close(self) -> None:
        self._inbox.close(0)
        self._cuts.close(0)
        self._outbox.close()
        self._context.term()
