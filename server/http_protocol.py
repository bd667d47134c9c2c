"""HTTP/1.1 of uvicorn and httptools, with an end to what a client may send and keep waiting for.

Without it a head that never ends would fill the memory, before any key is asked for; and whoever
takes nothing of an answer would keep its place for ever, and what is drawn for it in memory. Where
httptools is missing uvicorn has h11 instead, which bounds heads itself.
Knows nothing of routes or keys.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16  # of a request line with its headers, or of a body's trailers
STALL_S = 60.0  # in which a head must be whole, and a body must go on
TAKE_S = 300.0  # in which some of an answer must be taken: a program may be stopped a while

TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_unread = 0  # bytes that have brought neither a whole head nor more of a body
        self._has_moved = False
        self._stall: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._note_taken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_moved = False
        super().data_received(data)
        self._num_unread = 0 if self._has_moved else self._num_unread + len(data)
        if self._num_unread > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._has_moved = True
        super().on_headers_complete()
        self._wait()

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)
        self._wait()

    def on_message_complete(self) -> None:
        self._has_moved = True
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._note_taken()
        super().resume_writing()

    def _note_taken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _refuse(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering:  # else it would stand in the middle of another answer
            self.transport.write(TOO_LARGE)
        self.transport.close()

    def _wait(self) -> None:
        self._stop_waiting()
        self._stall = self.loop.call_later(STALL_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _give_up(self) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._wait()
        else:
            self.transport.close()
