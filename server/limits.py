"""Bounds on what one client may send: the size and coding of a body, the requests of a minute.

Knows nothing of what the routes do.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zipage_lang.server.api_error import TYPES, ApiError, error_response

MAX_CLIENTS = 10_000  # whose rates are remembered; the longest silent is forgotten


class BodyLimit:
    """Answers 413 to a body over `max_bytes`, before it is read where its length is told.

    A coded body (gzip and its like) is a 415: a small one could become any size.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        coding = headers.get("content-encoding", "")
        if coding.strip().lower() not in ("", "identity"):
            return await _answer(_coded(coding), scope, receive, send)
        length = headers.get("content-length")
        if length is None:
            return await self._read_first(scope, receive, send)
        if not length.isdecimal() or int(length) > self._max_bytes:
            return await self._refuse(scope, receive, send)
        await self._app(scope, receive, send)

    async def _read_first(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body of unknown length is read here, where it can still be refused as too long."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client left
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return await self._refuse(scope, receive, send)
            if not message.get("more_body"):
                break
        await self._app(scope, _replay(bytes(body), receive), send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            413,
            f"the request's body is over {self._max_bytes} bytes, the server's max_body_mib; "
            "shorten it",
            code="body_too_large",
        )
        await _answer(error, scope, receive, send)


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error)
    response.headers["connection"] = "close"  # the rest of the body is not read
    await response(scope, receive, send)


def _coded(coding: str) -> ApiError:
    return ApiError(
        415,
        f"content-encoding {coding!r:.40} is not taken; send the body as it is",
        code="coded_body",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


class RateLimit:
    """Answers 429 where a client, as `name_of` tells them apart, has used up its requests.

    Each has a bucket of `per_minute` requests that fills up evenly again. Reading (GET) is free.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        per_minute: int,
        name_of: Callable[[Scope], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._per_minute = per_minute
        self._name_of = name_of
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        wait_s = self._take(self._name_of(scope))
        if wait_s <= 0:
            return await self._app(scope, receive, send)
        error = ApiError(
            429,
            f"more than {self._per_minute} requests a minute; the next one is let in in "
            f"{wait_s:.1f} s",
            type=TYPES[429],
            code="rate_limit_exceeded",
            retry_after=wait_s,
        )
        await error_response(error)(scope, receive, send)

    def _take(self, name: str) -> float:
        """Take a request from the bucket; where there is none, the seconds until there is."""
        now, per_second = self._clock(), self._per_minute / 60.0
        left, at = self._buckets.pop(name, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - at) * per_second)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / per_second
        self._buckets[name] = (left if wait_s else left - 1.0, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait_s
