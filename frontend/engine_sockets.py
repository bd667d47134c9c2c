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
    MessageError,
    ToClient,
    ToEngine,
    decode_for_client,
    encode,
)

MAX_IPC_PATH_LEN = 100  # a Unix socket's path holds about 107 bytes


class EngineSockets:
    """Binds `to_engine` (PUSH) and `to_client` (PULL); the engine connects to both.

    The folder has mode 0700. It goes with `hide`, on close, or at the latest when the interpreter
    ends.
    """

    def __init__(self) -> None:
        self.folder = make_folder()
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._context = zmq.asyncio.Context()
        self._sender = self._bind(zmq.PUSH, "to_engine")
        self._receiver = self._bind(zmq.PULL, "to_client")
        self._free = free_with(self, self._context, [self._sender, self._receiver])

    def send(self, message: ToEngine) -> None:
        """Queue a message; the order is kept. Raises ValueError for one the engine would drop."""
        self._sender.send(encode_for_engine(message))

    async def receive(self) -> ToClient:
        """The next message. Raises MessageError for bytes that are none."""
        return decode_for_client(single_frame(await self._receiver.recv_multipart()))

    def hide(self) -> None:
        """Remove the folder: who is connected stays so, and nobody else can connect any more."""
        self._remove_folder()

    def close(self) -> None:
        """Drop what is not sent yet, and the folder."""
        self._free()
        self._remove_folder()

    def _bind(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # bounded by the requests there are; never drop or block
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.bind(f"ipc://{self.folder / name}")
        return socket


def free_with(
    owner: object,
    context: zmq.asyncio.Context,
    sockets: list[zmq.asyncio.Socket],
    linger_ms: int = 0,
) -> "weakref.finalize[..., object]":
    """What closes the sockets and then the context: call it, or it is called when `owner` is gone.

    Left to the garbage collector, a context may go before its sockets and wait for them for ever.
    """
    free = weakref.finalize(owner, _free, context, sockets, linger_ms)
    free.atexit = False  # another thread may still be at them, and all goes with the process
    return free


def _free(context: zmq.asyncio.Context, sockets: list[zmq.asyncio.Socket], linger_ms: int) -> None:
    for socket in sockets:
        socket.close(linger_ms)
    context.term()


def encode_for_engine(message: ToEngine) -> bytes:
    """Raises ValueError for a message that the engine would drop."""
    data = encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}; "
            "shorten the request"
        )
    return data


def single_frame(frames: list[bytes]) -> bytes:
    """What a message consists of; raises MessageError for one of several frames."""
    if len(frames) != 1:
        raise MessageError(f"a message of {len(frames)} frames")
    return frames[0]


def make_folder() -> Path:
    """A private folder whose path is short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="zipage-")
    if len(folder) + len("/to_engine") > MAX_IPC_PATH_LEN:
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="zipage-", dir="/tmp")
    return Path(folder)
