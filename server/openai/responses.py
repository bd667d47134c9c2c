"""POST /v1/responses, as far as it is text and functions; nothing is kept between requests.

Knows nothing of templates or of how events are made.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.openai.answers import ResponseObject, answers, with_not_found
from zipage_lang.server.openai.chat_call import prepare_chat
from zipage_lang.server.openai.model_traits import TraitsBook
from zipage_lang.server.openai.response_reply import ResponseReply
from zipage_lang.server.openai.responses_request import ResponsesRequest
from zipage_lang.server.service import Service, beside_streams
from zipage_lang.server.sse import event_stream


def make_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["openai"])
    traits = TraitsBook(service)

    @router.post(
        "/v1/responses", responses=with_not_found(answers(ResponseObject, is_streamed=True))
    )
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answer an input."""
        call = await prepare_chat(service, traits.current(), body.as_chat(), id_prefix="resp")
        reply = ResponseReply(call, body)
        if not body.streams:
            (output,) = await call.complete()
            return JsonResponse(await beside_streams(len(output.text), reply.whole, output))
        return await event_stream(request, reply.events(), done=False)

    return router
