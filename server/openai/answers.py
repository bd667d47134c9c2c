"""What the routes answer, as models for the OpenAPI document; the answers themselves are dicts.

Knows nothing of how answers are made.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Usage(_Answer):
    """Tokens. `kv` counts slots of the KV cache, which is ours."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]
    kv: dict[str, int]


class CalledFunction(_Answer):
    name: str
    arguments: str


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    """`reasoning_content` and `reasoning` are the same thought under its two names."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall] = []


class ChatChoice(_Answer):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    matched_stop: str | int | None


class ChatCompletion(_Answer):
    """A chat answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    matched_stop: str | int | None


class Completion(_Answer):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(_Answer):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(_Answer):
    """The one model that this server has."""

    object: Literal["list"]
    data: list[ModelCard]


class ResponseObject(_Answer):
    """An answer of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


EVENT = {  # as OpenAPI's tools read a stream: each event is an object of its fields
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "JSON of a chunk, or [DONE]"},
        "event": {"type": "string"},
    },
    "required": ["data"],
}

Documented = dict[int | str, dict[str, Any]]


def answers(model: type[BaseModel], *, is_streamed: bool = False) -> Documented:
    """A route's `responses`."""
    documented: dict[str, Any] = {"model": model, "description": (model.__doc__ or "").strip()}
    if is_streamed:
        documented["content"] = {"text/event-stream": {"schema": EVENT}}
    return {200: documented}


def with_not_found(documented: Documented) -> Documented:
    """The same, for a route that may not know what it is asked for."""
    return documented | {404: {"description": "There is no such model."}}
