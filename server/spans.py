"""A request's record as an OpenTelemetry span, named by the conventions for generative AI.

Knows nothing of HTTP. Needs the extra otel.
"""

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.server.request_log import request_fields
from zipage_lang.server.request_record import RequestRecord
from zipage_lang.server.tracing import trace_headers

ATTRIBUTES = {
    "engine_request_id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
    "seconds": "gen_ai.latency.e2e",
    "samples": "gen_ai.request.choice.count",
    "route": "url.path",
    "client": "client.address",
}


def make_provider(endpoint: str) -> TracerProvider:
    """Sends spans to that OTLP endpoint over HTTP, in batches, from a thread of its own."""
    provider = TracerProvider(resource=Resource.create({"service.name": "zipage"}))
    exporter = OTLPSpanExporter(endpoint=_traces_url(endpoint))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RequestSpans:
    """An observer of the service: a span from each request's arrival to its end."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("zipage")
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[RequestRecord, Span] = {}

    def on_start(self, record: RequestRecord) -> None:
        self._spans[record] = self._tracer.start_span(
            "generate",
            context=self._propagator.extract(trace_headers.get() or {}),
            kind=SpanKind.SERVER,
            start_time=_wall_ns(record.created),
        )

    def on_output(self, record: RequestRecord, output: RequestOutput) -> None:
        return

    def on_end(self, record: RequestRecord) -> None:
        span = self._spans.pop(record)
        for name, value in request_fields(record).items():
            if value not in (None, ""):
                span.set_attribute(ATTRIBUTES.get(name, f"zipage.{name}"), value)
        if record.first_token_at is not None:
            span.add_event("first token", timestamp=_wall_ns(record.first_token_at))
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        ended_at = time.monotonic() if record.ended_at is None else record.ended_at
        span.end(_wall_ns(ended_at))


def _wall_ns(monotonic_s: float) -> int:
    """Nanoseconds since 1970 of a moment on the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def _traces_url(endpoint: str) -> str:
    """A collector's base address means its path for traces, as OTEL_EXPORTER_OTLP_ENDPOINT does."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
