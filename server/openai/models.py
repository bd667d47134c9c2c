"""GET /v1/models and /v1/models/{id}.

Knows nothing of how models are loaded.
"""

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.openai.answers import ModelCard, ModelList, answers, with_not_found
from zipage_lang.server.openai.chat_call import unknown_model
from zipage_lang.server.service import Service


def make_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["openai"])
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": created,
            "owned_by": "zipage",
            "root": service.ready.model,
            "parent": None,
            "max_model_len": service.ready.max_model_len,
        }

    @router.get("/v1/models", responses=answers(ModelList))
    async def list_models() -> Response:
        """The model that is served."""
        return JsonResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{model_id:path}", responses=with_not_found(answers(ModelCard)))
    async def get_model(model_id: str) -> Response:
        """One model by its name."""
        if model_id != service.model_name:
            raise unknown_model(service, model_id)
        return JsonResponse(card())

    return router
