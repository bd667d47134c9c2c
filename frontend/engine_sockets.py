"""The two sockets between a client and its engine, in a private folder that goes with them.

Knows nothing of what the messages mean or who reads them.
"""

import shutil
import tempfile
import weakref
from pathlib import Path

import zmq
import zmq.asyncio

from zipage_lang.runtime.messages import (
    MAX_MESSAGE_BYTES,
    ToClient,
    ToEngine,
    decode_for_client,
    encode,
)

MAX_IPC_PATH_LEN = 100  # a Unix socket's path holds about 107 bytes


class EngineSockets:
    """Binds `to_engine` (PUSH) and `to_client` (PULL); the engine connects to both.

    The folder has mode 0700 and is removed on close, or at the latest when the interpreter ends.
    """

    def __init__(self) -> None:
        self.folder = make_folder()
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._context = zmq.asyncio.Context()
        self._sender = self._bind(zmq.PUSH, "to_engine")
        self._receiver = self._bind(zmq.PULL, "to_client")

    def send(self, message: ToEngine) -> None:
        """Queue a message; the order is kept. Raises ValueError for one the engine would drop."""
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}; "
                "shorten the request"
            )
        self._sender.send(data)

    async def receive(self) -> ToClient:
        """The next message. Raises MessageError for bytes that are none."""
        return decode_for_client(await self._receiver.recv())

    def close(self) -> None:
        """Drop what is not sent yet, and the folder."""
        self._context.destroy(linger=0)
        self._remove_folder()

    def _bind(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # bounded by the requests there are; never drop or block
        socket.bind(f"ipc://{self.folder / name}")
        return socket


def make_folder() -> Path:
    """A private folder whose path is short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="zipage-")
    if len(folder) + len("/to_engine") > MAX_IPC_PATH_LEN:
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="zipage-", dir="/tmp")
    return Path(folder)
