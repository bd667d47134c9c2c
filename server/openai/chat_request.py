"""What /v1/chat/completions takes, as pydantic reads and documents it.

Knows nothing of engines, templates or of what the fields become.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr

from zipage_lang.server.bodies import Items
from zipage_lang.server.openai.fields import Body, Json, SamplingFields, otherwise

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class ContentPart(Body):
    """One part of a message's content; only text is understood."""

    type: StrictStr
    text: StrictStr | None = None
    refusal: StrictStr | None = None


Content = Annotated[
    StrictStr | Items[ContentPart] | None,
    otherwise('must be a text, null or a list of parts such as {"type": "text", "text": "..."}'),
]


class CalledFunction(Body):
    """A function that the model called in an earlier turn."""

    name: StrictStr
    arguments: StrictStr | Json | None = Field(None, description="JSON, as a text")


class ToolCall(Body):
    """A call of an earlier turn."""

    id: StrictStr | None = None
    type: StrictStr | None = None
    function: CalledFunction


class Message(Body):
    """One message of the conversation."""

    role: Role
    content: Content = None
    name: StrictStr | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = Field(None, description="what the model thought")
    reasoning: StrictStr | None = Field(None, description="the same, by its other name")


class FunctionTool(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: StrictStr | None = None
    parameters: Json | None = Field(None, description="JSON schema of the arguments")
    strict: StrictBool | None = Field(None, description="hold the arguments to their schema")


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionTool


class NamedFunction(Body):
    name: StrictStr


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolsChoice(Body):
    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedTools(Body):
    """The tools, of those given, that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsChoice


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
    otherwise('must be none, auto, required or {"type": "function", "function": {"name": "..."}}'),
]


class SchemaFormat(Body):
    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: Json | StrictBool | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """What the answer's text must look like. It binds the answer, never the thinking."""

    model_config = ConfigDict(extra="allow")  # structural tags have fields of their own

    type: Literal[
        "text", "json_object", "json_schema", "regex", "grammar", "ebnf", "structural_tag"
    ]
    json_schema: SchemaFormat | None = Field(None, description="for json_schema")
    regex: StrictStr | None = Field(None, description="for regex; `pattern` is the same")
    pattern: StrictStr | None = None
    grammar: StrictStr | None = Field(None, description="for grammar: EBNF; `ebnf` is the same")
    ebnf: StrictStr | None = None
    format: Json | None = Field(None, description="for structural_tag: xgrammar's format")


class ChatRequest(SamplingFields):
    """A conversation to go on with."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "default",
                    "messages": [{"role": "user", "content": "What is a radix tree?"}],
                    "max_completion_tokens": 64,
                },
                {
                    "messages": [{"role": "user", "content": "Name a city."}],
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "max_completion_tokens": 16,
                    "kv": {"mode": "fixed", "budget": 256},
                },
            ]
        }
    )

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(
        None, ge=1, description="thinking counts too; null: up to the end of the context"
    )
    max_tokens: StrictInt | None = Field(
        None, ge=1, description="older name of max_completion_tokens, which wins"
    )
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Effort | None = Field(None, description="none turns thinking off")
    thinking_token_budget: StrictInt | None = Field(
        None, ge=0, description="tokens of thinking at most"
    )
    max_thinking_tokens: StrictInt | None = Field(
        None, ge=0, description="SGLang's name of thinking_token_budget"
    )
    min_thinking_tokens: StrictInt | None = Field(
        None, ge=0, description="tokens of thinking at least"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="further values for the chat template"
    )
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = Field(
        None, description="go on within the last message"
    )
