"""POST /v1/chat/completions.

Knows nothing of templates, tools or of how chunks are made.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.openai.answers import ChatCompletion, answers, with_not_found
from zipage_lang.server.openai.chat_call import prepare_chat
from zipage_lang.server.openai.chat_reply import ChatChunks, chat_completion
from zipage_lang.server.openai.chat_request import ChatRequest
from zipage_lang.server.openai.model_traits import TraitsBook
from zipage_lang.server.service import Service, beside_streams
from zipage_lang.server.sse import event_stream


def make_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["openai"])
    traits = TraitsBook(service)

    @router.post(
        "/v1/chat/completions", responses=with_not_found(answers(ChatCompletion, is_streamed=True))
    )
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Go on with a conversation."""
        call = await prepare_chat(service, traits.current(), body)
        if not body.streams:
            outputs = await call.complete()
            size = sum(len(output.text) for output in outputs)
            return JsonResponse(await beside_streams(size, chat_completion, call, outputs))
        chunks = ChatChunks(
            call, tells_usage=body.tells_usage, tells_usage_always=body.tells_usage_always
        )
        return await event_stream(request, chunks.events())

    return router
