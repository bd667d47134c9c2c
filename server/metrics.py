"""GET /metrics: what Prometheus reads. The engine is asked once per scrape and never else.

Knows nothing of names or buckets.
"""

import asyncio
import logging

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from zipage_lang.frontend.errors import EngineClosedError, EngineDiedError
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.engine_metrics import EngineMetrics
from zipage_lang.server.request_metrics import RequestMetrics
from zipage_lang.server.service import Service
from zipage_lang.server.tenants import operator_only

ENGINE_PATIENCE_S = 5.0  # a scraper usually gives up after ten

log = logging.getLogger("zipage.metrics")


def install_metrics(app: FastAPI, service: Service) -> None:
    """Adds the route, and an observer of all requests."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    service.observers.append(RequestMetrics(registry))
    engine = EngineMetrics()
    registry.register(engine)

    @app.get("/metrics", response_class=PlainTextResponse, tags=["operation"])
    async def metrics() -> PlainTextResponse:
        """All metrics in Prometheus' text form; those of the engine only while one answers.

        For the operator, unless the settings open it to everybody.
        """
        if not service.config.open_metrics:
            operator_only(service.tenant)
        await _take(engine, service)
        text = generate_latest(registry).decode()
        return PlainTextResponse(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _take(engine: EngineMetrics, service: Service) -> None:
    try:
        async with asyncio.timeout(ENGINE_PATIENCE_S):
            snapshot = await service.llm.snapshot(max_cells=0, max_nodes=0, max_requests=0)
        engine.take(snapshot, service.ready, service.num_restarts)
    except (ApiError, EngineDiedError, EngineClosedError, TimeoutError) as error:
        log.debug("a scrape without the engine's numbers: %s", error)
        engine.clear(service.num_restarts)
