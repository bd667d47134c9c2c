"""One chat request made ready for the engine: prompt, sampling, and how its samples are read.

Knows nothing of HTTP, or of the form in which the answer is told.
"""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from zipage_lang.frontend.outputs import FINISH_ABORT, RequestOutput
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.chat_logprobs import ChatLogprobs
from zipage_lang.server.openai.chat_request import ChatRequest
from zipage_lang.server.openai.conversation import prompt_text, text_of
from zipage_lang.server.openai.fields import SamplingFields
from zipage_lang.server.openai.grammar_fields import grammar_of
from zipage_lang.server.openai.model_traits import ModelTraits
from zipage_lang.server.openai.sample_reader import SampleReader
from zipage_lang.server.openai.sampling import kv_params, sampling_params
from zipage_lang.server.openai.thinking import think_params
from zipage_lang.server.openai.thought_feed import ThoughtFeed
from zipage_lang.server.openai.tool_use import ToolUse, tool_use
from zipage_lang.server.service import LONG_TEXT, Service

MANY_MESSAGES = 200  # for a template to write while streams wait


@dataclasses.dataclass(frozen=True)
class ChatCall:
    """What is asked of the engine, and what is needed to tell its answer."""

    service: Service
    request_id: str
    model: str
    created: int  # Unix time
    token_ids: list[int]
    sampling: SamplingParams
    options: dict[str, Any]  # of Service.generate
    tools: ToolUse
    traits: ModelTraits

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """As they come. Raises ApiError; closing it aborts the request."""
        stream = self.service.generate(
            self.token_ids, self.sampling, request_id=self.request_id, **self.options
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield unaborted(self.service, output)

    async def complete(self) -> list[RequestOutput]:
        """The last output of each sample. Raises ApiError."""
        outputs = await self.service.complete(
            self.token_ids, self.sampling, request_id=self.request_id, **self.options
        )
        return [unaborted(self.service, output) for output in outputs]

    def new_reader(self) -> SampleReader:
        """For one sample."""
        sampling, tools = self.sampling, self.tools
        parser = logprobs = None
        if tools.callable_:
            parser = self.traits.tool_syntax.new_parser(tools.names, tools.max_calls)
        if sampling.logprobs is not None:
            logprobs = ChatLogprobs(
                self.service.llm.tokenizer, skip_special_tokens=sampling.skip_special_tokens
            )
        return SampleReader(ThoughtFeed(sampling.think), parser, logprobs)


async def prepare_chat(
    service: Service, traits: ModelTraits, body: ChatRequest, *, id_prefix: str = "chatcmpl"
) -> ChatCall:
    """Raises ApiError for what can't be done."""
    check_model(service, body.model)
    _check_logprobs(body)
    tools = tool_use(body)
    text = await _rendered(service, traits, body, tools)
    token_ids = await service.encode(text, add_special_tokens=False)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    kv = kv_params(body)
    grammar = tools.grammar(traits.tool_syntax, grammar_of(body, body.response_format))
    if tools.callable_ and traits.hides_tool_tags:
        body = body.model_copy(update={"skip_special_tokens": False})
    sampling = sampling_params(
        body,
        traits.sampling,
        max_tokens=output_len(service, len(token_ids), asked, kv),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        think=think_params(body, traits, tools, text),
        **grammar,
    )
    return ChatCall(
        service=service,
        request_id=new_id(id_prefix, body),
        model=body.model or service.model_name,
        created=int(time.time()),
        token_ids=token_ids,
        sampling=sampling,
        options=engine_options(service, body, kv),
        tools=tools,
        traits=traits,
    )


def check_model(service: Service, name: str | None) -> None:
    """Raises ApiError 404 for another model's name, where the server is strict about it."""
    if service.config.strict_model and name not in (None, service.model_name):
        raise unknown_model(service, name or "")


def unknown_model(service: Service, name: str) -> ApiError:
    """What is said to someone who asks for another model."""
    return ApiError(
        404,
        f"there is no model {name!r}; this server has {service.model_name!r}",
        param="model",
        code="model_not_found",
    )


def output_len(
    service: Service, num_prompt_tokens: int, asked: int | None, kv: KVParams | None
) -> int:
    """max_tokens of a request; None asks for as much as there is room for.

    Raises ApiError 400 where prompt and output together don't fit the context.
    """
    ready = service.ready
    room = ready.max_model_len - num_prompt_tokens
    if room < 1 or (asked or 0) > room:
        wish = f" and {asked} of output were asked for" if asked else ""
        # Clients that do not read codes look for the words "maximum context length is".
        raise ApiError(
            400,
            f"this model's maximum context length is {ready.max_model_len} tokens, but the prompt "
            f"has {num_prompt_tokens}{wish}; shorten the prompt or the output",
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    mode = ready.kv_mode if kv is None or kv.mode is None else kv.mode
    pool_room = ready.num_blocks * ready.block_size - num_prompt_tokens
    return room if mode == "fixed" else max(1, min(room, pool_room))


def engine_options(service: Service, body: SamplingFields, kv: KVParams | None) -> dict[str, Any]:
    """How the engine treats the request besides sampling. Raises ApiError 403."""
    service.tenant.check_priority(body.priority or 0)
    return {
        "kv": kv,
        "namespace": body.cache_salt or "",
        "priority": body.priority or 0,
        "group_id": body.session_id or "",
    }


def new_id(prefix: str, body: SamplingFields) -> str:
    """The caller's own name of the request, or a new one."""
    return body.request_id or body.rid or f"{prefix}-{uuid.uuid4().hex}"


def unaborted(service: Service, output: RequestOutput) -> RequestOutput:
    """The output. Raises ApiError for one that was aborted: clients must not take it for whole."""
    if output.finish_reason != FINISH_ABORT:
        return output
    if service.state != "ready":
        raise ApiError(
            503,
            "the server is shutting down and could not finish; ask again",
            type="service_unavailable",
            code="draining",
            retry_after=1.0,
        )
    raise ApiError(400, "the request was aborted before it was finished", code="request_aborted")


async def _rendered(
    service: Service, traits: ModelTraits, body: ChatRequest, tools: ToolUse
) -> str:
    tokenizer = service.llm.tokenizer
    if _is_little(body):
        return prompt_text(body, tools, traits, tokenizer)
    return await asyncio.to_thread(prompt_text, body, tools, traits, tokenizer)


def _is_little(body: ChatRequest) -> bool:
    """Whether a template is done with it at once: of values of any kind that is not known."""
    has_values = body.tools or body.chat_template_kwargs or any(m.tool_calls for m in body.messages)
    if has_values or len(body.messages) >= MANY_MESSAGES:
        return False
    thoughts = (message.reasoning_content or message.reasoning or "" for message in body.messages)
    texts = (text_of(message.content) for message in body.messages)
    return sum(map(len, (*thoughts, *texts))) < LONG_TEXT


def _check_logprobs(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
