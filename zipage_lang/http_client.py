"""JSON over HTTP and streams of server-sent events, with errors as the language's own.

Knows nothing of what is asked or answered.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeVar

import httpx2
import msgspec

from zipage_lang.errors import ServerError
from zipage_lang.event_lines import EventLines, LineTooLongError

RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504})
BAD_REQUEST = frozenset({400, 413, 422})
DONE = "[DONE]"
T = TypeVar("T")
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

    def get_blocking(self, path: str) -> dict[str, Any]:
        """A GET outside of the loop. Raises ServerError, or ValueError for a bad request."""
        try:
            with httpx2.Client(**self._options) as client:
                response = client.get(path)
        except httpx2.RequestError as error:
            raise _unreachable(self.url, error) from error
        return _object_of(response)

    async def get(self, path: str) -> dict[str, Any]:
        """Raises as `get_blocking`."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
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
                if not response.is_success:
                    await response.aread()
                    raise _error_of(response)
                async for data in _data_lines(response):
                    if data == DONE:
                        return
                    yield _event_of(data)
        except httpx2.RequestError as error:
            raise _unreachable(self.url, error) from error
        except LineTooLongError as error:
            raise ServerError(f"{self.url}: {error}", None, retryable=False) from error
        raise ServerError(f"{self.url}: the stream broke off", None, retryable=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        content = None if body is None else dict(body)
        try:
            response = await self._client.request(method, path, json=content)
        except httpx2.RequestError as error:
            raise _unreachable(self.url, error) from error
        return _object_of(response)


def _object_of(response: httpx2.Response) -> dict[str, Any]:
    """The answer's JSON object; an answer without content is an empty one."""
    if not response.is_success:
        raise _error_of(response)
    if not response.content:
        return {}
    try:
        value = response.json()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise garbled(f"{response.request.url} answered {response.text[:80]!r}")
    return value


def checked(value: Any, kind: type[T]) -> T:
    """What the server said, as this kind. Raises ServerError where it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise garbled(f"the server said {value!r:.80} ({error})") from error


def garbled(what: str) -> ServerError:
    """What a server said makes no sense: it is no such server, or something between spoils it."""
    return ServerError(f"{what}, which is no answer to what was asked", None, retryable=False)


async def _data_lines(response: httpx2.Response) -> AsyncGenerator[str, None]:
    lines = EventLines()
    async for piece in response.aiter_bytes():
        for line in lines.feed(piece):
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data:
                yield data


def _event_of(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if isinstance(event, dict) and event.get("error"):
        status = event["error"].get("code") if isinstance(event["error"], dict) else None
        raise _error(_message_of(event), status if isinstance(status, int) else None)
    if not isinstance(event, dict):
        raise garbled(f"the stream said {data[:80]!r}")
    return event


def _error_of(response: httpx2.Response) -> Exception:
    try:
        message = _message_of(response.json())
    except (ValueError, RecursionError):
        message = response.text[:200]
    return _error(f"{response.request.url}: {message}", response.status_code)


def _error(message: str, status: int | None) -> Exception:
    if status in BAD_REQUEST:
        return ValueError(message)
    return ServerError(message, status, retryable=status in RETRYABLE)


def _message_of(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") or error if isinstance(error, dict) else error
    return str(message) or "the server gave no reason"


def _unreachable(url: str, error: Exception) -> ServerError:
    reason = str(error) or type(error).__name__
    return ServerError(f"{url}: no answer ({reason}); is the server up?", None, retryable=True)
