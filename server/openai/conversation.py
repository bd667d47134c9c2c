"""A request's messages as the chat template wants them, and the prompt's text.

What a template can't write itself (tools, calls, their results) is written into the texts.
Knows nothing of tokens, engines or of how the answer is read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zipage_lang.frontend.tokenizer import Tokenizer
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.chat_request import ChatRequest, ContentPart, Message, ToolCall
from zipage_lang.server.openai.model_traits import ModelTraits
from zipage_lang.server.openai.sampling import bad_field
from zipage_lang.server.openai.tool_use import ToolUse

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = {"developer": "system", "function": "tool"}  # newer and older names
SET_ELSEWHERE = (  # names that apply_chat_template takes for its own
    "conversation",
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "sanitize_control_tokens",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
    "load_audio_from_video",
    "self",
)

TemplateMessage = dict[str, Any]


def prompt_text(
    body: ChatRequest, tools: ToolUse, traits: ModelTraits, tokenizer: Tokenizer
) -> str:
    """The conversation as one text. Raises ApiError 400 for what the template does not take."""
    messages = template_messages(body.messages, tools, traits)
    writes_tools = traits.template_takes_tools and tools.offered
    add_prompt = body.add_generation_prompt is not False
    with bad_field("messages"):
        return tokenizer.render_chat(
            messages,
            add_generation_prompt=add_prompt,
            continue_final_message=bool(body.continue_final_message),
            tools=tools.for_template() if writes_tools else None,
            **template_values(body),
        )


def template_values(body: ChatRequest) -> dict[str, Any]:
    """What the template is told besides: reasoning_effort's switches, then the caller's own."""
    values: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        values = {
            "reasoning_effort": body.reasoning_effort,
            "enable_thinking": thinks,  # Qwen, GLM
            "thinking": thinks,  # DeepSeek, Granite
        }
    for name, value in (body.chat_template_kwargs or {}).items():
        if name in SET_ELSEWHERE:
            raise ApiError(
                400,
                f"chat_template_kwargs can't set {name!r}; use the request's own fields",
                param="chat_template_kwargs",
            )
        values[name] = value
    return values


def template_messages(
    messages: Sequence[Message], tools: ToolUse, traits: ModelTraits
) -> list[TemplateMessage]:
    """The messages in the form that templates of the transformers library expect."""
    tool_names: dict[str, str] = {}  # call id -> name
    written = []
    for message in messages:
        tool_names |= {call.id: call.function.name for call in message.tool_calls or () if call.id}
        if traits.template_takes_tools:
            written.append(_native(message, tool_names))
        else:
            written.append(_plain(message, traits))
    if tools.offered and not traits.template_takes_tools:
        return _instructed(written, traits.tool_syntax.instructions(tools.for_template()))
    return written


def _native(message: Message, tool_names: Mapping[str, str]) -> TemplateMessage:
    """Calls and results as fields of their own."""
    written = _base(message)
    if message.tool_calls:
        written["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    name = message.name or tool_names.get(message.tool_call_id or "")
    if name is not None:
        written["name"] = name
    return written


def _plain(message: Message, traits: ModelTraits) -> TemplateMessage:
    """Calls and results as text, for templates that know only roles and contents."""
    written = _base(message)
    if written["role"] == "tool":
        result = f"<tool_response>\n{written['content']}\n</tool_response>"
        return {"role": "user", "content": result}
    syntax = traits.tool_syntax
    calls = [
        syntax.written(call.function.name, _arguments_text(call))
        for call in message.tool_calls or ()
    ]
    parts = [written["content"], *calls] if written["content"] else calls
    return {**written, "content": syntax.separator.join(parts)} if calls else written


def _base(message: Message) -> TemplateMessage:
    role = ROLES.get(message.role, message.role)
    written: TemplateMessage = {"role": role, "content": text_of(message.content)}
    thought = message.reasoning_content or message.reasoning
    if thought and role == "assistant":
        written |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
    return written


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """A message's text. Raises ApiError 400 for parts that are none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part) for part in content)


def _part_text(part: ContentPart) -> str:
    if part.type in TEXT_PARTS and part.text is not None:
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    raise ApiError(
        400,
        f"a part of type {part.type!r:.60} is not understood: this model takes text alone",
        param="messages",
    )


def _call(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they get an object where it is one."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": call.function.name, "arguments": {} if arguments is None else arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _arguments_text(call: ToolCall) -> str:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments or {}, ensure_ascii=False)


def _instructed(messages: list[TemplateMessage], instructions: str) -> list[TemplateMessage]:
    """The instructions in the system message, which is made where there is none."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    first = messages[0]
    content = f"{first['content']}\n\n{instructions}" if first["content"] else instructions
    return [{**first, "content": content}, *messages[1:]]
