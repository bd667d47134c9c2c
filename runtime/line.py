"""The line between an engine's process and its one client, as the engine's loop sees it.

Two kinds: `parent_line.ParentLine` to the process that started this one, `remote_line.RemoteLine`
to one that connects over TCP. Knows nothing of what the messages mean.
"""

from typing import Protocol

NO_MESSAGE = b""  # stands for what was no single frame; decoding it fails, so it is counted
MAX_QUEUED = 64  # messages that wait in memory here; the rest waits at the sender


class LineBrokenError(Exception):
    """The client is out of reach for good, and no other can come."""


class Line(Protocol):
    """Bytes in, bytes out; one message at a time, in order."""

    def wait(self, timeout_ms: int) -> None:
        """Until a message is there, but not for long."""
        ...

    def receive(self) -> bytes | None:
        """The next message; None when none waits now. Raises LineBrokenError."""
        ...

    def send(self, data: bytes) -> None:
        """To the client, if there is one."""
        ...

    def take_departure(self) -> bool:
        """True once when the client has left: all it asked for is to be forgotten.

        Nothing of another client is received before.
        """
        ...

    def close(self) -> None:
        """Sends what is queued, for a moment, and frees the sockets."""
        ...
