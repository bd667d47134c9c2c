"""JSON over HTTP and streams of server-sent events, with errors as the language's own.

Knows nothing of what is asked or answered.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2

from zipage_lang.errors import ServerError

RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504})
BAD_REQUEST = frozenset({400, 413, 422})
DONE = "[DONE]"
NO_LIMIT = httpx2.Limits(max_connections=None, max_keepalive_connections=100)


class HttpClient:
    """One server. The async methods must all run on one event loop."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r} must begin with http:// or https://")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.url = url.rstrip("/")
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx2.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None),
        }
        self._client = httpx2.AsyncClient(**self._options, limits=NO_LIMIT)

    def get_blocking(self, path: str) -> Any:
        """A GET outside of the loop. Raises ServerError, or ValueError for a bad request."""
        try:
            with httpx2.Client(**self._options) as client:
                response = client.get(path)
        except httpx2.TransportError as error:
            raise _unreachable(self.url, error) from error
        return _json_of(response)

    async def get(self, path: str) -> Any:
        """Raises as `get_blocking`."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Raises as `get_blocking`."""
        return await self._request("POST", path, body)

    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The stream's JSON objects up to its [DONE]; leaving early closes the connection.

        Raises as `get_blocking`, for an error that comes in mid-stream too.
        """
        try:
            async with self._client.stream("POST", path, json=dict(body)) as response:
                if response.is_error:
                    await response.aread()
                    raise _error_of(response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or not data:
                        continue
                    if data == DONE:
                        return
                    yield _event_of(data)
        except httpx2.TransportError as error:
            raise _unreachable(self.url, error) from error
        raise ServerError(f"{self.url}: the stream broke off", None, retryable=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        content = None if body is None else dict(body)
        try:
            response = await self._client.request(method, path, json=content)
        except httpx2.TransportError as error:
            raise _unreachable(self.url, error) from error
        return _json_of(response)


def _json_of(response: httpx2.Response) -> Any:
    if response.is_error:
        raise _error_of(response)
    return response.json() if response.content else None


def _event_of(data: str) -> dict[str, Any]:
    event = json.loads(data)
    if isinstance(event, dict) and event.get("error"):
        status = event["error"].get("code") if isinstance(event["error"], dict) else None
        raise _error(_message_of(event), status if isinstance(status, int) else None)
    if not isinstance(event, dict):
        raise ServerError(f"{data[:80]!r} is no object of a stream", None, retryable=False)
    return event


def _error_of(response: httpx2.Response) -> Exception:
    try:
        message = _message_of(response.json())
    except ValueError:
        message = response.text[:200]
    return _error(f"{response.request.url}: {message}", response.status_code)


def _error(message: str, status: int | None) -> Exception:
    if status in BAD_REQUEST:
        return ValueError(message)
    return ServerError(message, status, retryable=status in RETRYABLE)


def _message_of(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


def _unreachable(url: str, error: Exception) -> ServerError:
    reason = str(error) or type(error).__name__
    return ServerError(f"{url}: no answer ({reason}); is the server up?", None, retryable=True)
