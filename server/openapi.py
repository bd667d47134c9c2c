"""The OpenAPI document: FastAPI's own, with the errors that every route may answer.

Knows nothing of when errors happen or what the routes do.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from zipage_lang.server.auth import OPEN_PATHS

MEANINGS = {
    400: "What was asked for is not possible; the message says why.",
    401: "No API key, or a wrong one.",
    403: "This is for the server's operator, or not for web pages of elsewhere.",
    404: "There is no such thing.",
    413: "The body is too long.",
    415: "The body is coded, or not of the type that its headers say.",
    429: "Too many requests; Retry-After says when the next one is let in.",
    500: "The server failed.",
    503: "The engine is starting, busy or gone; Retry-After says when to try again.",
}
OF_EVERY_ROUTE = (401, 403, 500, 503)
OF_POSTS = (400, 413, 415, 429)
EVENT_STREAM: dict[str, Any] = {  # the content of an answer that is streamed
    "text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
}
NOT_OURS = ("HTTPValidationError", "ValidationError")  # FastAPI's 422; ours is 400


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi()`, and so /openapi.json, tell the errors as they are."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_errors(make())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _with_errors(document: dict[str, Any]) -> dict[str, Any]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            if path not in OPEN_PATHS:
                _add_errors(operation["responses"], method)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in NOT_OURS:
        schemas.pop(name, None)
    detail = ErrorDetail.model_json_schema()
    body = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
    body.pop("$defs", None)
    schemas |= {"ErrorDetail": detail, "ErrorBody": body}
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document


def _add_errors(responses: dict[str, Any], method: str) -> None:
    statuses = OF_EVERY_ROUTE + (OF_POSTS if method == "post" else ())
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for status in statuses:
        responses.setdefault(str(status), {"description": MEANINGS[status], "content": content})
    if "404" in responses:
        responses["404"].setdefault("content", content)
