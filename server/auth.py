"""Lets in whoever sends a known key as a bearer token, as its tenant; some paths are open to all.

Knows nothing of what the routes do.
"""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from zipage_lang.server.api_error import TYPES, ApiError, error_response
from zipage_lang.server.tenants import Tenants, call_of

# Probes carry no keys, and the page asks for one before it asks for data.
OPEN_PATHS = frozenset({"/health", "/ready", "/dashboard"})


class KeyCheck:
    """Answers 401 without a key that is known, where one is needed."""

    def __init__(
        self, app: ASGIApp, *, tenants: Tenants, open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        key = bearer_token(scope)
        tenant = self._tenants.find(key.encode("latin-1")) or self._tenants.anybody
        if tenant is not None or scope["path"] in self._open_paths:
            with call_of(tenant):
                return await self._app(scope, receive, send)
        what = "a wrong API key was sent" if key else "an API key is needed"
        error = ApiError(
            401,
            f"{what}; send one of the server's as the header Authorization: Bearer KEY",
            type=TYPES[401],
            code="invalid_api_key",
        )
        await error_response(error)(scope, receive, send)


def bearer_token(scope: Scope) -> str:
    """The request's bearer token, its bytes as Latin-1; "" without one."""
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    # Of HTTP's own white space alone: the last byte of a key may be one of Latin-1's.
    return token.strip(" \t") if scheme.lower() == "bearer" else ""
