"""An answer in the form of the Responses API: one object, or events as it comes.

Knows nothing of HTTP or of how the answer is made.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from zipage_lang.frontend.outputs import FINISH_LENGTH, RequestOutput
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.chat_call import ChatCall
from zipage_lang.server.openai.response_items import OutputItems
from zipage_lang.server.openai.responses_request import ResponsesRequest
from zipage_lang.server.openai.usage import UsageCount
from zipage_lang.server.sse import NamedEvent

Json = dict[str, Any]


class ResponseReply:
    """One response."""

    def __init__(self, call: ChatCall, body: ResponsesRequest) -> None:
        self._call, self._body = call, body
        self._items = OutputItems()
        self._reader = call.new_reader()
        self._num_events = 0

    def whole(self, output: RequestOutput) -> Json:
        """The response to a last output."""
        self._items.feed(self._reader.feed(output))
        return self._ended(output)

    async def events(self) -> AsyncGenerator[Json, None]:
        """The response as events. Raises ApiError before the first; later ones are told."""
        last = None
        try:
            async with aclosing(self._call.outputs()) as outputs:
                async for output in outputs:
                    if last is None:
                        yield self._event("response.created", response=self._begun())
                        yield self._event("response.in_progress", response=self._begun())
                    last = output
                    for event in self._items.feed(self._reader.feed(output)):
                        yield self._numbered(event)
        except ApiError as error:
            if last is None:
                raise
            yield self._event("response.failed", response=self._failed(error))
            raise
        assert last is not None, "a stream of outputs has at least one"
        for event in self._items.finish(_status(last)):
            yield self._numbered(event)
        yield self._event(f"response.{_status(last)}", response=self._object(last))

    def _ended(self, output: RequestOutput) -> Json:
        self._items.finish(_status(output))
        return self._object(output)

    def _event(self, kind: str, **fields: Any) -> Json:
        return self._numbered({"type": kind, **fields})

    def _numbered(self, event: Json) -> Json:
        number = self._num_events
        self._num_events += 1
        return NamedEvent(event, sequence_number=number)

    def _begun(self) -> Json:
        return {**self._head(), "status": "in_progress", "output": [], "usage": None}

    def _failed(self, error: ApiError) -> Json:
        told = {"code": error.code or "server_error", "message": error.message}
        return {**self._begun(), "status": "failed", "error": told}

    def _object(self, output: RequestOutput) -> Json:
        is_cut = output.finish_reason == FINISH_LENGTH
        return {
            **self._head(),
            "status": _status(output),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.items,
            "usage": _usage(output),
        }

    def _head(self) -> Json:
        """What stands in a response from the beginning: much of it is the request, told back."""
        body, sampling = self._body, self._call.sampling
        choice = body.tool_choice or "auto"
        return {
            "id": self._call.request_id,
            "object": "response",
            "created_at": self._call.created,
            "model": self._call.model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": self._call.tools.is_parallel,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "background": False,
            "user": body.user,
        }


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.finish_reason == FINISH_LENGTH else "completed"


def _usage(output: RequestOutput) -> Json:
    count = UsageCount()
    count.note(output)
    return {
        "input_tokens": count.prompt_tokens,
        "input_tokens_details": {"cached_tokens": count.cached_tokens},
        "output_tokens": count.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": count.reasoning_tokens},
        "total_tokens": count.prompt_tokens + count.completion_tokens,
        "kv": count.kv(),
    }
