"""Lets in whoever sends one of the keys as a bearer token; some paths are open to everybody.

Knows nothing of what the routes do.
"""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from zipage_lang.server.api_error import TYPES, ApiError, error_response

# Probes carry no keys, and the page asks for one before it asks for data.
OPEN_PATHS = frozenset({"/health", "/ready", "/dashboard"})


class KeyCheck:
    """Answers 401 without a key that is known. Without keys at all everybody is let in."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        key = bearer_token(scope)
        if self._is_known(key):
            return await self._app(scope, receive, send)
        what = "a wrong API key was sent" if key else "an API key is needed"
        error = ApiError(
            401,
            f"{what}; send one of the server's as the header Authorization: Bearer KEY",
            type=TYPES[401],
            code="invalid_api_key",
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        """Looks at all keys, each in constant time: how long it takes tells nothing of them."""
        sent = key.encode("latin-1")
        return sum(hmac.compare_digest(sent, known) for known in self._keys) > 0


def bearer_token(scope: Scope) -> str:
    """The request's bearer token; "" without one."""
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
