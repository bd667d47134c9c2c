"""Server-sent events: an iterator of events as a streamed answer that is closed when it must be.

Knows nothing of what the events say.
"""

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from zipage_lang.server.api_error import ApiError, error_body, internal_error
from zipage_lang.server.json_response import encode_json

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies: pass it on at once
LINE_END = re.compile("\r\n|\r|\n")  # those of the format; Unicode has more
UNICODE_ENDS = re.compile("\u0085|\u2028|\u2029".encode())
ESCAPES = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}
DONE = b"data: [DONE]\n\n"

Event = Any  # a text, or what msgspec encodes: a dict or a struct


class NamedEvent(dict[str, Any]):
    """An event whose "type" is also told in a line of its own, as the Responses API does."""


log = logging.getLogger("zipage.server")


async def event_stream(
    request: Request, events: AsyncIterator[Event], *, done: bool = True
) -> StreamingResponse:
    """The events as `data: ...` lines; a text goes as it is, all else as JSON.

    Awaits the first event, so that an error before it has a status of its own. An error later
    becomes an event and ends the stream. `done`: `[DONE]` follows the last event.
    When the client leaves, `events` is closed.
    """
    try:
        first = await anext(events, None)
    except BaseException:
        await _close(events)
        raise
    request_id = getattr(request.state, "request_id", "?")
    chunks = _chunks(first, events, DONE if done else b"", request_id)
    return _EventStream(chunks, events)


class _EventStream(StreamingResponse):
    """Sends each chunk as it comes. Who left is known to the middleware, which cancels this."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], events: AsyncIterator[Event]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            await _close(self.body_iterator)
            await _close(self._events)


async def _chunks(
    first: Event | None, events: AsyncIterator[Event], end: bytes, request_id: str
) -> AsyncGenerator[bytes, None]:
    try:
        if first is not None:
            yield _line(first)
            async for event in events:
                yield _line(event)
    except ApiError as error:
        yield _line(_stream_error(error))
    except Exception:
        log.exception("a stream failed")
        yield _line(_stream_error(internal_error(request_id)))
    if end:
        yield end


def _line(event: Event) -> bytes:
    if isinstance(event, str):
        lines = [b"data: " + line.encode("utf-8", "replace") for line in LINE_END.split(event)]
        return b"\n".join(lines) + b"\n\n"
    if isinstance(event, NamedEvent):
        kind = str(event["type"]).encode()
        return b"event: " + kind + b"\ndata: " + _json_line({**event}) + b"\n\n"
    return b"data: " + _json_line(event) + b"\n\n"


def _json_line(value: Any) -> bytes:
    """JSON that also those read as one line who cut lines where Unicode does, as HTTPX does."""
    line = encode_json(value)
    return (
        UNICODE_ENDS.sub(lambda end: ESCAPES[end[0]], line) if UNICODE_ENDS.search(line) else line
    )


def _stream_error(error: ApiError) -> dict[str, Any]:
    """The stream has its status already, so the error's own is told as its code."""
    body = error_body(error)
    body["error"]["code"] = error.code or error.status
    return body


async def _close(iterator: Any) -> None:
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()
