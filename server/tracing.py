"""OpenTelemetry, where the settings name an endpoint: one span per request, in the caller's trace.

Without an endpoint nothing is imported and nothing runs. Knows nothing of what a span says.
"""

import contextvars

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from zipage_lang.server.service import Service

TRACE_HEADERS = ("traceparent", "tracestate")

trace_headers: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "zipage_trace_headers", default=None
)


def install_tracing(app: FastAPI, service: Service) -> None:
    """Adds the observer and what reads the caller's trace. Raises ValueError without the extra."""
    endpoint = service.config.otel_endpoint
    if endpoint is None:
        return
    try:
        from zipage_lang.server.spans import RequestSpans, make_provider
    except ImportError as error:
        raise ValueError(
            f"otel_endpoint={endpoint!r} needs the extra otel (missing: {error.name}); "
            "install zipage-lang[otel]"
        ) from error
    service.observers.append(RequestSpans(make_provider(endpoint)))
    app.add_middleware(TraceHeaders)


class TraceHeaders:
    """Keeps the caller's trace headers for the spans that are made in the request's context."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = Headers(scope=scope)
            trace_headers.set({name: sent[name] for name in TRACE_HEADERS if name in sent})
        await self._app(scope, receive, send)
