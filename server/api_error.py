"""Errors as clients read them: a status and `{"error": {message, type, param, code}}`.

Knows nothing of engines or of what the routes do.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from zipage_lang.server.json_response import JsonResponse

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """What a client is told in place of an answer.

    Parameters:
        status: of HTTP.
        message: what is wrong and what to do.
        type: the class of error, as OpenAI names them.
        param: the field at fault, if one is.
        code: one word that programs may look for, say "context_length_exceeded".
        retry_after: seconds after which it is worth trying again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.retry_after = param, code, retry_after


def error_body(error: ApiError) -> dict[str, Any]:
    """The answer's JSON."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    """The whole answer; Retry-After is in whole seconds, rounded up."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, -int(-error.retry_after // 1)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonResponse(error_body(error), error.status, headers)


def internal_error(request_id: str) -> ApiError:
    """What a client is told of an error of ours; the log tells the rest."""
    message = f"the server failed; its log says why, under request id {request_id}"
    return ApiError(500, message, type=TYPES[500])


def install_error_handlers(app: FastAPI) -> None:
    """Every error that routes raise gets this form; 400 stands for a body that does not fit.

    What nobody expected is for the middleware in failures.py, so that it has a request id.
    """
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = (error.errors() or [{}])[0]
    place = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path")]
    what = str(first.get("msg", "the request does not fit"))
    if first.get("type") == "json_invalid":
        return error_response(ApiError(400, f"the body is no JSON: {_reason(first)}"))
    if not place:
        message = "the body must be a JSON object, sent as content-type: application/json"
        return error_response(ApiError(400, message))
    name = ".".join(place)
    return error_response(ApiError(400, f"{name}: {what}", param=name))


def _reason(problem: Mapping[str, Any]) -> str:
    context = problem.get("ctx")
    return str(context.get("error")) if isinstance(context, Mapping) else str(problem.get("msg"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 400:  # of FastAPI's, which gives no other reason
        message = "the body can't be read: it is no JSON in UTF-8, or it nests too deeply"
    if error.status_code == 404:
        message = f"there is no {request.method} {request.scope['path']}"
    if error.status_code == 405:
        message = f"{request.scope['path']} does not take {request.method}"
    kind = TYPES.get(error.status_code, "invalid_request_error")
    response = error_response(ApiError(error.status_code, message, type=kind))
    response.headers.update(error.headers or {})
    return response
