"""The HTTP request that is being served: its id, route and client, and the middleware that knows.

Pure ASGI, so that a streamed chunk costs one more call and no more.
Knows nothing of engines.
"""

import contextvars
import dataclasses
import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SANE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

NO_SNIFFING = (b"x-content-type-options", b"nosniff")
UNLOGGED_PATHS = frozenset({"/dashboard/data"})  # the live page asks several times a second

log = logging.getLogger("zipage.access")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestScope:
    """What is known of the HTTP request in whose context the code runs."""

    request_id: str
    route: str
    client: str


_current: contextvars.ContextVar[RequestScope | None] = contextvars.ContextVar(
    "zipage_request", default=None
)


def current_scope() -> RequestScope | None:
    """The request being served; None outside of one."""
    return _current.get()


def client_address(scope: Scope) -> str:
    """Where the caller is; "" where that is not known."""
    client = scope.get("client")
    return client[0] if client else ""


def one_line_path(scope: Scope) -> str:
    """The path for log lines: nothing in it begins another line or plays with a terminal."""
    return quote(scope["path"], safe="/:@+=,;~", errors="replace")


class RequestIds:
    """Gives each request an id (the caller's own x-request-id where it is sane), tells it in every
    answer, and logs a line for each request if asked to. Browsers are told to take each answer for
    what it says it is."""

    def __init__(self, app: ASGIApp, *, logs_requests: bool = False) -> None:
        self._app = app
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if SANE_ID.fullmatch(asked) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        token = _current.set(RequestScope(request_id, scope["path"], client_address(scope)))
        header = (b"x-request-id", request_id.encode("ascii"))
        status, started = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header, NO_SNIFFING]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._logs_requests and scope["path"] not in UNLOGGED_PATHS:
                _log_request(scope, status, time.monotonic() - started)
            _current.reset(token)


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    fields = {
        "method": scope["method"],
        "path": one_line_path(scope),
        "status": status or "left",
        "seconds": round(seconds, 4),
    }
    line = "%(method)s %(path)s %(status)s in %(seconds)s s"
    log.info(line % fields, extra={"fields": fields})
