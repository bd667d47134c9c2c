"""The line to a client that connects over TCP: encrypted, one client at a time.

CURVE on every connection, and only clients whose public key is in the engine's list are let in. A
client begins with Hello and from then on has the engine for itself, until it says Shutdown, its
connection breaks, or nothing is heard of it for a while (it asks for a sign of life every two
seconds). A connection that comes back is a new one: what was on its way may be lost, so the old
one's requests must not go on. Knows nothing of what other messages mean.
"""

import logging
import time

import zmq
from zmq.auth.thread import ThreadAuthenticator

from zipage_lang.runtime.curve_keys import check_address, read_engine_keys
from zipage_lang.runtime.line import MAX_QUEUED, NO_MESSAGE
from zipage_lang.runtime.messages import MAX_MESSAGE_BYTES, Failed, Hello, Shutdown, encode

LEASE_S = 20.0
RETRY_S = 0.01
LINGER_MS = 1000
HELLO, SHUTDOWN = encode(Hello()), encode(Shutdown())

log = logging.getLogger("zipage.engine")


class RemoteLine:
    """Listens at `address` (tcp://host:port; port 0 takes any) with the keys in a folder.

    Raises ValueError for an address or keys that won't do.
    """

    def __init__(self, address: str, keys_folder: str, *, lease_s: float = LEASE_S) -> None:
        check_address(address)
        keys = read_engine_keys(keys_folder)
        self._lease_s = lease_s
        self._client: bytes | None = None  # its connection's name
        self._heard_at = 0.0
        self._has_left = False
        self._context = zmq.Context()
        self._doorman = ThreadAuthenticator(self._context)
        self._doorman.start()
        self._doorman.configure_curve(domain="*", location=keys.clients)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.own.secret
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"can't listen at {address}: {error}") from error

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait(self, timeout_ms: int) -> None:
        self._socket.poll(timeout_ms)

    def receive(self) -> bytes | None:
        """The client's next message. Greetings and goodbyes of all who come are seen to here."""
        for _ in range(MAX_QUEUED):
            if self._has_left:
                return None
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            data = self._admitted(frames[0], frames[1] if len(frames) == 2 else NO_MESSAGE)
            if data is not None:
                return data
        self._check_lease()
        return None

    def send(self, data: bytes) -> None:
        """To the client. One that takes nothing for a whole lease has left."""
        deadline = time.monotonic() + self._lease_s
        while self._client is not None:
            try:
                self._socket.send_multipart([self._client, data], zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() > deadline:
                    self._lose("it reads nothing")
                time.sleep(RETRY_S)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._lose("its connection broke")
            else:
                return

    def take_departure(self) -> bool:
        has_left, self._has_left = self._has_left, False
        return has_left

    def close(self) -> None:
        self._socket.close()
        self._doorman.stop()
        self._context.term()

    def _admitted(self, sender: bytes, data: bytes) -> bytes | None:
        """What is for the engine; None for what was seen to."""
        if self._client is None and data == HELLO:
            self._client = sender
            log.warning("a client has joined")
        if sender != self._client:
            self._refuse(sender, data)
            return None
        self._heard_at = time.monotonic()
        if data == SHUTDOWN:
            self._lose("it is done")
            return None
        return data

    def _refuse(self, sender: bytes, data: bytes) -> None:
        error = "the engine has let go of this client; connect again"
        if data == HELLO:
            error = "the engine has a client already, and takes one at a time"
        try:
            self._socket.send_multipart([sender, encode(Failed(error=error))], zmq.NOBLOCK)
        except zmq.ZMQError:
            log.info("a refused client has left before it was told")

    def _check_lease(self) -> None:
        if self._client is not None and time.monotonic() - self._heard_at > self._lease_s:
            self._lose(f"nothing was heard of it for {self._lease_s:g} s")

    def _lose(self, reason: str) -> None:
        log.warning("the client has left: %s", reason)
        self._client, self._has_left = None, True
