"""Whether the server lives, is ready, and can generate: for probes and load balancers.

Knows nothing of what clients ask for.
"""

import importlib.metadata
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.service import Service

NO_BODY: dict[int | str, dict[str, Any]] = {
    200: {"description": "Yes.", "content": {}},
    503: {"description": "No.", "content": {}},
}
VERSION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Its name is `version`.",
        "content": {
            "application/json": {
                "schema": {"type": "object", "additionalProperties": {"type": "string"}}
            }
        },
    },
}


def make_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["health"], default_response_class=Response)

    @router.get("/health", responses=NO_BODY)
    async def health() -> Response:
        """Does the server run? 503 once its engine is given up."""
        return Response(status_code=503 if service.state == "dead" else 200)

    @router.get("/ready", responses=NO_BODY)
    async def ready() -> Response:
        """Does the server take requests? 503 while it starts, restarts, drains or gets no answer
        of its engine."""
        return Response(status_code=200 if service.is_answering else 503)

    @router.get("/health_generate", responses=NO_BODY)
    async def health_generate() -> Response:
        """Can the engine generate a token?"""
        try:
            eos = service.ready.eos_token_ids or [0]
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            await service.complete(
                eos[:1], sampling, request_id=f"health-{uuid.uuid4().hex}", priority=-1
            )
        except ApiError:
            return Response(status_code=503)
        return Response(status_code=200)

    @router.get("/version", responses=VERSION)
    async def version() -> Response:
        """The server's version."""
        return JsonResponse({"version": importlib.metadata.version("zipage-lang")})

    return router
