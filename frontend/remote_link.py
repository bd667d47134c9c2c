"""The link to an engine that was started elsewhere: TCP, encrypted with CURVE.

Knows nothing of requests or of what messages mean.
"""

import asyncio
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from zipage_lang.frontend.engine_sockets import encode_for_engine, free_with, single_frame
from zipage_lang.runtime.curve_keys import check_address, read_client_keys
from zipage_lang.runtime.messages import MAX_MESSAGE_BYTES, ToClient, ToEngine, decode_for_client

CONNECT_TIMEOUT_S = 10.0
CLOSE_LINGER_MS = 1000  # for the goodbye to go out
REACHED = zmq.EVENT_HANDSHAKE_SUCCEEDED
BROKEN = zmq.EVENT_DISCONNECTED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class RemoteLink:
    """Connects to tcp://host:port with the keys in a folder. An EngineLink.

    Raises ValueError for an address or keys that won't do. A connection that broke does not come
    back: what was on its way may be lost.
    """

    def __init__(self, address: str, keys_folder: "str | Path | None") -> None:
        check_address(address)
        if keys_folder is None:
            raise ValueError(
                f"{address} needs CURVE keys: plain TCP is not spoken; give the folder `client` "
                "that `zipage engine keys` made"
            )
        keys = read_client_keys(keys_folder)
        self._address, self._keys = address, keys_folder
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys.engine
        self._socket.curve_publickey = keys.own.public
        self._socket.curve_secretkey = keys.own.secret
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._events = self._socket.get_monitor_socket(REACHED | BROKEN | REFUSED)
        self._free = free_with(self, self._context, [self._socket, self._events], CLOSE_LINGER_MS)
        self._socket.connect(address)

    def send(self, message: ToEngine) -> None:
        self._socket.send(encode_for_engine(message))

    async def receive(self) -> ToClient:
        return decode_for_client(single_frame(await self._socket.recv_multipart()))

    async def wait_end(self) -> str:
        try:
            event = await asyncio.wait_for(self._next(REACHED | REFUSED), CONNECT_TIMEOUT_S)
        except TimeoutError:
            return f"nothing answers at {self._address}, or its key is not the one in {self._keys}"
        if event & REFUSED:
            return f"{self._address} refuses the keys in {self._keys}"
        await self._next(BROKEN)
        return f"the connection to {self._address} broke"

    async def _next(self, kinds: int) -> int:
        """The next event of these kinds."""
        while True:
            event: int = (await recv_monitor_message(self._events))["event"]
            if event & kinds:
                return event

    def settle(self) -> None:
        """Nothing to do: the connection is this client's alone."""

    def cut(self) -> None:
        """Nothing to do: the engine is somebody else's, and lets go of who is silent."""

    async def end(self, grace_s: float) -> None:
        """Nothing to do: the engine outlives its clients."""

    def close(self) -> None:
        self._free()
