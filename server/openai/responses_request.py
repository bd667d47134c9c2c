"""What /v1/responses takes, and the same as a chat request.

Knows nothing of engines or of how the answer is told.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr

from zipage_lang.server.api_error import ApiError
from zipage_lang.server.bodies import Items, values_of
from zipage_lang.server.openai.chat_request import ChatRequest, ContentPart, Effort
from zipage_lang.server.openai.fields import Body, Json, SamplingFields

NOT_KEPT = ("previous_response_id", "conversation", "prompt")


class InputItem(Body):
    """A message, a call of an earlier turn, its output, or an earlier thought."""

    type: StrictStr | None = Field(
        None, description="message, function_call, function_call_output or reasoning"
    )
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: StrictStr | Items[ContentPart] | None = None
    call_id: StrictStr | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    output: StrictStr | Items[ContentPart] | None = None


class FlatTool(Body):
    """A function that the model may call."""

    type: StrictStr
    name: StrictStr | None = None
    description: StrictStr | None = None
    parameters: Json | None = None
    strict: StrictBool | None = None


class NamedFlatTool(Body):
    type: Literal["function"]
    name: StrictStr


class TextFields(Body):
    format: Json | None = Field(
        None, description="text, json_object, json_schema, regex, grammar or structural_tag"
    )
    verbosity: StrictStr | None = None


class ReasoningFields(Body):
    effort: Effort | None = None
    summary: StrictStr | None = None


class ResponsesRequest(SamplingFields):
    """A conversation to go on with. Nothing is kept: each request brings its whole input."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "default",
                    "input": "What is a radix tree?",
                    "instructions": "Be brief.",
                    "max_output_tokens": 64,
                }
            ]
        }
    )

    input: StrictStr | Items[InputItem]
    instructions: StrictStr | None = Field(None, description="a system message before the input")
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    tools: Items[FlatTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFlatTool | None = None
    parallel_tool_calls: StrictBool | None = None
    thinking_token_budget: StrictInt | None = Field(None, ge=0)
    max_thinking_tokens: StrictInt | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, StrictStr], values_of(StrictStr)] | None = None
    store: StrictBool | None = Field(None, description="nothing is ever stored")
    background: StrictBool | None = Field(None, description="refused")
    previous_response_id: StrictStr | None = Field(None, description="refused")
    conversation: Json | StrictStr | None = Field(None, description="refused")
    prompt: Json | None = Field(None, description="refused")

    def as_chat(self) -> ChatRequest:
        """The same as a chat request. Raises ApiError 400 for what this server does not do."""
        self._check_kept()
        fields = self.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)
        more = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _response_format(self.text),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "thinking_token_budget": self.thinking_token_budget,
            "max_thinking_tokens": self.max_thinking_tokens,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return _validated(fields | more)

    def _check_kept(self) -> None:
        for name in NOT_KEPT:
            if getattr(self, name) is not None:
                raise ApiError(
                    400,
                    f"{name} is not supported: this server keeps no responses; send the whole "
                    "conversation as input",
                    param=name,
                    code="unsupported_parameter",
                )
        if self.background:
            raise ApiError(400, "background is not supported; use stream", param="background")
        if (self.n or 1) > 1:
            raise ApiError(400, "a response has one answer; leave n out", param="n")

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought = ""
        for item in self.input:
            if item.type == "reasoning":
                thought = _thought(item.content)
            else:
                _add_item(messages, item, thought)
                thought = ""
        return messages

    def _tool_choice(self) -> Json | str | None:
        if isinstance(self.tool_choice, NamedFlatTool):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice


def _add_item(messages: list[Json], item: InputItem, thought: str) -> None:
    kind = item.type or "message"
    if kind == "message" and item.role is not None:
        content = item.content
        parts = content if isinstance(content, str) or content is None else _dumped(content)
        messages.append({"role": item.role, "content": parts, "reasoning_content": thought or None})
    elif kind == "function_call" and item.name is not None:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "reasoning_content": thought or None})
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
    elif kind == "function_call_output":
        output = item.output if isinstance(item.output, str) else _dumped(item.output or [])
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    else:
        raise ApiError(
            400,
            f"an input item of type {kind!r:.60} is not understood; send messages, function calls "
            "and their outputs",
            param="input",
        )


def _dumped(parts: Sequence[ContentPart]) -> list[Json]:
    return [part.model_dump() for part in parts]


def _thought(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


def _tool(tool: FlatTool) -> Json:
    if tool.type != "function" or tool.name is None:
        raise ApiError(
            400, f"tools of type {tool.type!r:.60} are not supported; give functions", param="tools"
        )
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _response_format(text: TextFields | None) -> Json | None:
    form = text.format if text else None
    if form is None or form.get("type") != "json_schema" or "json_schema" in form:
        return form
    schema = {name: form[name] for name in ("name", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": schema}


def _validated(fields: Json) -> ChatRequest:
    try:
        return ChatRequest.model_validate(fields)
    except ValueError as error:
        raise ApiError(400, f"the request does not fit: {_first(error)}") from error


def _first(error: ValueError) -> str:
    problems = getattr(error, "errors", lambda: [{"msg": str(error)}])()
    place = ".".join(str(part) for part in problems[0].get("loc", ()))
    return f"{place}: {problems[0]['msg']}" if place else str(problems[0]["msg"])
