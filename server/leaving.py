"""Ends the work on a request whose client has left, by cancelling it where it stands.

Streams and plain answers alike: whoever waits for the engine is cancelled, and that aborts there.
Knows nothing of engines.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LeavingClients:
    """Listens for the client's end of the line while the request is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        listening = _Listening(receive, send)
        try:
            await self._app(scope, listening.receive, listening.send)
        except asyncio.CancelledError:
            if not listening.take_back_cancel():
                raise
        finally:
            listening.end()


class _Listening:
    """One request: passes messages through, and from the body's end on waits for a disconnect."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._work = asyncio.current_task()
        self._listener: asyncio.Task[Message] | None = None
        self._has_cancelled = False
        self._is_answered = False

    async def receive(self) -> Message:
        if self._listener is not None:
            return await asyncio.shield(self._listener)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._start()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start()  # for routes that read no body
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self._is_answered = True
        await self._send(message)

    def take_back_cancel(self) -> bool:
        """Whether it was we who cancelled the work; then it ends quietly."""
        if not self._has_cancelled or self._work is None:
            return False
        return self._work.uncancel() == 0

    def end(self) -> None:
        if self._listener is not None:
            self._listener.cancel()

    def _start(self) -> None:
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name="zipage-client-end")

    async def _listen(self) -> Message:
        message = await self._receive()
        while message["type"] == "http.request":  # what the route did not read
            message = await self._receive()
        if not self._is_answered and self._work is not None:
            self._has_cancelled = True
            self._work.cancel()
        return message
