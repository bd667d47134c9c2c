"""Keeps web pages of elsewhere away from a server that only the browser's machine can reach.

A page may send simple requests to any address, and by changing what its own name means (DNS
rebinding) even read the answers. Keys stop both; this stops them where there are none.
Knows nothing of keys or routes.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from zipage_lang.server.api_error import TYPES, ApiError, error_response
from zipage_lang.server.config import ServerConfig

OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def hosts_of(config: ServerConfig, *, has_keys: bool) -> frozenset[str] | None:
    """The names by which the server may be called; None: by any."""
    if config.allowed_hosts:
        is_any = "*" in config.allowed_hosts
        return None if is_any else frozenset(name.lower() for name in config.allowed_hosts)
    if has_keys or not _is_loopback(config.host):
        return None
    return frozenset((*OWN_NAMES, config.host.lower()))


class WebGuard:
    """Answers 403 to other names than `hosts`, and to pages of other origins than `origins`.

    `hosts`: None allows every name. `origins`: None allows every origin; a server's own is allowed.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: frozenset[str] | None, origins: Collection[str] | None
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = None if origins is None or "*" in origins else frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        error = None
        if self._hosts is not None and host and _name_of(host) not in self._hosts:
            error = _refusal(f"the name {host!r:.80}", "allowed-host", "host_not_allowed")
        elif origin is not None and not self._may_come_from(origin, host):
            error = _refusal(f"pages of {origin!r:.80}", "cors-origin", "origin_not_allowed")
        if error is None:
            return await self._app(scope, receive, send)
        await error_response(error)(scope, receive, send)

    def _may_come_from(self, origin: str, host: str) -> bool:
        if self._origins is None or origin in self._origins:
            return True
        return origin.lower().partition("://")[2] == host.lower()


def _refusal(who: str, flag: str, code: str) -> ApiError:
    return ApiError(
        403,
        f"{who} may not call this server, which has no keys; start it with --{flag}, or with keys",
        type=TYPES[403],
        code=code,
    )


def _name_of(host: str) -> str:
    """A Host header without its port; what is no host is ""."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
