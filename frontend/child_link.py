"""The link to an engine in a child process of its own, over ipc sockets in a private folder.

Knows nothing of requests or of what messages mean.
"""

import asyncio
import functools
from collections.abc import Sequence

import msgspec

from zipage_lang.frontend.child_process import ChildProcess
from zipage_lang.frontend.engine_sockets import EngineSockets
from zipage_lang.frontend.errors import EngineStartError
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.messages import ToClient, ToEngine


class ChildLink:
    """Starts `command` with socket folder and configuration appended. An EngineLink.

    Raises EngineStartError where that can't be run; nothing is left behind then.
    """

    def __init__(self, command: Sequence[str], config: EngineConfig) -> None:
        self._exited = asyncio.Event()
        self._sockets = EngineSockets()
        arguments = [str(self._sockets.folder), msgspec.json.encode(config).decode()]
        on_exit = functools.partial(_set_from_thread, asyncio.get_running_loop(), self._exited)
        try:
            self._child = ChildProcess([*command, *arguments], on_exit)
        except OSError as error:
            self._sockets.close()
            raise EngineStartError(f"the engine process could not be started: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.pid

    def send(self, message: ToEngine) -> None:
        self._sockets.send(message)

    async def receive(self) -> ToClient:
        return await self._sockets.receive()

    async def wait_end(self) -> str:
        await self._exited.wait()
        return f"the engine process {self._child.describe_end()}"

    def settle(self) -> None:
        self._sockets.hide()

    def cut(self) -> None:
        self._child.kill()

    async def end(self, grace_s: float) -> None:
        try:
            await asyncio.wait_for(self._exited.wait(), grace_s)
        except TimeoutError:
            self._child.kill()
            await self._exited.wait()

    def close(self) -> None:
        self._sockets.close()


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        return  # the loop was closed without close(): nobody is left to be told
