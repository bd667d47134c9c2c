"""Spans say what a request took and belong to the caller's trace; without an endpoint none are."""

import logging

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from zipage_lang.server import tracing
from zipage_lang.server.spans import RequestSpans, _traces_url

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def spans_of(with_app, body, headers=None):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def use(app):
        app.service.observers.append(RequestSpans(provider))
        app.app.add_middleware(tracing.TraceHeaders)
        return await app.post("/generate", body, headers=headers or {})

    answer = with_app(use)
    return answer, exporter.get_finished_spans()


def test_a_request_is_one_span_in_the_trace_of_its_caller(with_app):
    sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "call-7"}
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
    answer, (span,) = spans_of(with_app, body, sent)
    assert answer.status_code == 200
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["zipage.finish"] == "stop"
    assert span.attributes["url.path"] == "/generate"
    assert [event.name for event in span.events] == ["first token"]
    assert span.start_time <= span.events[0].timestamp <= span.end_time


def test_without_a_caller_s_trace_a_span_begins_one(with_app):
    _, (span,) = spans_of(with_app, {"input_ids": [5], "sampling_params": {"max_tokens": 1}})
    assert span.parent is None


def test_a_failed_request_is_a_failed_span(with_app, script):
    answer, (span,) = spans_of(with_app, {"input_ids": [script.EXIT, 5]})
    assert answer.status_code == 503
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["zipage.finish"] == "error"


def test_without_an_endpoint_nothing_is_installed(with_app):
    async def use(app):
        return [type(each).__name__ for each in app.service.observers], app.app.user_middleware

    observers, middleware = with_app(use)
    assert "RequestSpans" not in observers
    assert tracing.TraceHeaders not in [each.cls for each in middleware]


def test_a_missing_extra_is_named(with_app, monkeypatch):
    async def use(app):
        monkeypatch.setitem(__import__("sys").modules, "zipage_lang.server.spans", None)
        object.__setattr__(app.service.config, "otel_endpoint", "http://collector:4318")
        with pytest.raises(ValueError, match=r"otel_endpoint=.*install zipage-lang\[otel\]"):
            tracing.install_tracing(FastAPI(), app.service)

    with_app(use, starts=False)


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_an_endpoint_may_be_the_collector_s_base_address(endpoint):
    assert _traces_url(endpoint) == "http://c:4318/v1/traces"


def test_each_request_leaves_a_log_line_with_its_numbers_where_wanted(with_app, caplog):
    async def use(app):
        await app.post("/generate", {"input_ids": [5, 6], "sampling_params": {"max_tokens": 3}})

    with caplog.at_level(logging.INFO, "zipage.requests"):
        with_app(use)
        assert [each for each in caplog.records if each.name == "zipage.requests"] == []
        with_app(use, log_requests=True)
    (line,) = [each for each in caplog.records if each.name == "zipage.requests"]
    assert line.getMessage().startswith("stop after 3 tokens on 2 in ")
    assert line.fields["output_tokens"] == 3
    assert line.fields["route"] == "/generate"
