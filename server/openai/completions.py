"""POST /v1/completions.

Knows nothing of tokens or of how chunks are made.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.openai.answers import Completion, answers, with_not_found
from zipage_lang.server.openai.completion_call import prepare_completion
from zipage_lang.server.openai.completion_reply import CompletionChunks, completion
from zipage_lang.server.openai.completion_request import CompletionRequest
from zipage_lang.server.openai.model_traits import TraitsBook
from zipage_lang.server.service import Service, beside_streams
from zipage_lang.server.sse import event_stream


def make_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["openai"])
    traits = TraitsBook(service)

    @router.post("/v1/completions", responses=with_not_found(answers(Completion, is_streamed=True)))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Go on with a text, or with several."""
        call = await prepare_completion(service, traits.current(), body)
        if not body.streams:
            results = await call.complete()
            size = sum(len(o.text) + len(o.prompt_token_ids) for group in results for o in group)
            return JsonResponse(await beside_streams(size, completion, call, results))
        chunks = CompletionChunks(
            call, tells_usage=body.tells_usage, tells_usage_always=body.tells_usage_always
        )
        return await event_stream(request, chunks.events())

    return router
