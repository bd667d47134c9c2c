"""What the client asks of its way to an engine, whoever started that engine.

Two kinds: `child_link.ChildLink` to a process of its own, `remote_link.RemoteLink` over TCP.
Knows nothing of requests or of what messages mean.
"""

from typing import Protocol

from zipage_lang.runtime.messages import ToClient, ToEngine


class EngineLink(Protocol):
    """Messages out and in, in order, until the engine is out of reach."""

    def send(self, message: ToEngine) -> None:
        """Queue a message. Raises ValueError for one that is too long."""
        ...

    async def receive(self) -> ToClient:
        """The next message. Raises MessageError for bytes that are none."""
        ...

    async def wait_end(self) -> str:
        """Wait until the engine is out of reach; how that came."""
        ...

    def settle(self) -> None:
        """The engine has said that it is ready: from now on there is only this one."""
        ...

    def cut(self) -> None:
        """Give up an engine that gives no sign of life."""
        ...

    async def end(self, grace_s: float) -> None:
        """See to it that an engine of our own ends; it has `grace_s` to do so by itself."""
        ...

    def close(self) -> None:
        """Free the sockets."""
        ...
