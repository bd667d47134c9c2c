"""The web application: middleware, error forms and everybody's routes around one service.

Knows nothing of sockets or of how the engine is started.
"""

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from zipage_lang.server import health_routes, native_routes, tokenizer_routes
from zipage_lang.server.api_error import install_error_handlers
from zipage_lang.server.auth import OPEN_PATHS, KeyCheck
from zipage_lang.server.failures import Failures
from zipage_lang.server.leaving import LeavingClients
from zipage_lang.server.limits import BodyLimit, RateLimit
from zipage_lang.server.live.routes import install_dashboard
from zipage_lang.server.metrics import install_metrics
from zipage_lang.server.openai import chat, completions, models, responses
from zipage_lang.server.openapi import install_openapi
from zipage_lang.server.request_log import install_request_log
from zipage_lang.server.request_scope import RequestIds, client_address
from zipage_lang.server.service import Service
from zipage_lang.server.tenants import current_tenant
from zipage_lang.server.tracing import install_tracing
from zipage_lang.server.web_guard import WebGuard, hosts_of


def create_app(service: Service) -> FastAPI:
    """The app of a service. Its lifespan starts the engine in the background and drains it."""
    app = FastAPI(
        title="Zipage-Lang",
        version=importlib.metadata.version("zipage-lang"),
        lifespan=lambda _: _lifespan(service),
        middleware=_middleware(service),
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # to whatever the Host header says, and by plain HTTP
    )
    install_error_handlers(app)
    install_openapi(app)
    for routes in (
        native_routes,
        tokenizer_routes,
        health_routes,
        chat,
        completions,
        responses,
        models,
    ):
        app.include_router(routes.make_router(service))
    install_metrics(app, service)
    install_request_log(service)
    install_tracing(app, service)
    install_dashboard(app, service)
    return app


def _middleware(service: Service) -> list[Middleware]:
    """From the outside in."""
    config = service.config
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    tenants = service.tenants
    has_keys = tenants.anybody is None
    open_paths = {*OPEN_PATHS, *(["/metrics"] if config.open_metrics else [])}
    hosts = hosts_of(config, has_keys=has_keys)
    per_minute = config.rate_limit
    return [
        Middleware(RequestIds, logs_requests=config.log_requests),
        Middleware(Failures),
        *([cors] if config.cors_origins else []),
        Middleware(WebGuard, hosts=hosts, origins=None if has_keys else config.cors_origins),
        Middleware(KeyCheck, tenants=tenants, open_paths=open_paths),
        *([Middleware(RateLimit, per_minute=per_minute, name_of=_name_of)] if per_minute else []),
        Middleware(BodyLimit, max_bytes=int(config.max_body_mib * 2**20)),
        Middleware(LeavingClients),
    ]


def _name_of(scope: Scope) -> str:
    """By a key that is known, else by address: anybody could be somebody else with each request."""
    tenant = current_tenant()
    return tenant.name if tenant is not None and tenant.has_key else client_address(scope)


@contextlib.asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    starting = asyncio.create_task(service.start(), name="zipage-start")
    starting.add_done_callback(_look_at)  # who else waits for the start sees the error as well
    try:
        yield
    finally:
        await service.drain()


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
