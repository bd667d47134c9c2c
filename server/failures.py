"""The last resort: whatever a route did not expect becomes a 500 that says where to look.

Knows nothing of what can fail.
"""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zipage_lang.server.api_error import error_response, internal_error
from zipage_lang.server.request_scope import one_line_path

log = logging.getLogger("zipage.server")


class Failures:
    """Logs an unexpected error with its request id and answers 500, if no answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_begun = False

        async def noting_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception:
            log.exception("%s %s failed", scope["method"], one_line_path(scope))
            if has_begun:
                raise
            request_id = scope.get("state", {}).get("request_id", "?")
            await error_response(internal_error(request_id))(scope, receive, send)
