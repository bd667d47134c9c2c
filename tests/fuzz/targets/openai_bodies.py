"""Bodies of the server's generating routes: a validation error, an ApiError, or engine settings.

Chat messages go through four chat templates. Knows nothing of engines.
"""

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from test_support.fuzz_input import Choices, words_of

import zipage_lang
from zipage_lang.frontend.tokenizer import Tokenizer, load_tokenizer
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.native_wire import GenerateRequest
from zipage_lang.server.openai.chat_request import ChatRequest
from zipage_lang.server.openai.completion_request import CompletionRequest
from zipage_lang.server.openai.conversation import prompt_text
from zipage_lang.server.openai.grammar_fields import grammar_of
from zipage_lang.server.openai.model_traits import ModelTraits
from zipage_lang.server.openai.responses_request import ResponsesRequest
from zipage_lang.server.openai.sampling import kv_params, sampling_params
from zipage_lang.server.openai.thinking import think_params
from zipage_lang.server.openai.tool_formats import HERMES, LLAMA
from zipage_lang.server.openai.tool_use import tool_use

REASONER = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
QWEN_LIKE = (
    "{%- if tools %}<|im_start|>system\n{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{%- for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
    "{%- set messages = messages[1:] %}{% endif %}{%- for m in messages %}"
    "{%- if 'tool_calls' in m %}{%- if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
    "{%- else %}{{ m['role'] + m['content'] | trim }}{% endif %}{% endfor %}"
    "{%- if tools is not none %}{{ tools[0].function.parameters.properties | tojson }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATES = (None, QWEN_LIKE, LLAMA_LIKE, PLAIN)
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "strict": True,
    },
}
SHARED = {
    "model": "m",
    "stop": ["a", "b"],
    "temperature": 0.5,
    "n": 1,
    "logit_bias": {"3": 1},
    "kv": {"mode": "fixed", "budget": 32},
    "structured_outputs": {"choice": ["a", "b"]},
    "stream": True,
    "stream_options": {"include_usage": True},
    "guided_regex": "a+",
}
CHAT = {
    **SHARED,
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "thinking_token_budget": 8,
    "continue_final_message": True,
    "max_completion_tokens": 16,
}
COMPLETION = {**SHARED, "prompt": [[1, 2], [3]], "max_tokens": 4, "echo": True, "logprobs": 1}
RESPONSES = {
    **SHARED,
    "input": [
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
    ],
    "instructions": "be brief",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
    "reasoning": {"effort": "low"},
}
NATIVE = {
    "text": ["a", "b"],
    "sampling_params": {"max_new_tokens": 4, "stop": "a", "logit_bias": {"3": 1.0}, "think": {}},
    "kv": {"mode": "fixed", "budget": 32, "policy": "zipage"},
    "return_logprob": True,
    "top_logprobs_num": 2,
    "cache_salt": "s",
}
BODIES = ((ChatRequest, CHAT), (CompletionRequest, COMPLETION), (ResponsesRequest, RESPONSES))
WORDS = (
    *words_of(CHAT, COMPLETION, RESPONSES, NATIVE),
    "required",
    "auto",
    "ebnf",
    "regex",
    "lark",
)
SYNTAXES = (HERMES, LLAMA)


@functools.cache
def tokenizer(template: str | None) -> Tokenizer:
    """The tiny reasoner's, with its own chat template or this one."""
    made = load_tokenizer(REASONER)
    if template is not None:
        made._pretrained.chat_template = template
    return made


def target(data: bytes) -> None:
    choices = Choices(data)
    try:
        if choices.below(4) == 3:
            native = read(choices, GenerateRequest, NATIVE)
            assert len(native.ids()) == len(native.prompts)
            check_sampling(native.sampling())
            native.kv_params()
            return
        kind, template = choices.pick(BODIES)
        body = read(choices, kind, template)
        if isinstance(body, ResponsesRequest):
            body = body.as_chat()
        if isinstance(body, ChatRequest):
            settle(choices, body)
        else:
            check_sampling(
                sampling_params(body, {}, max_tokens=4, **grammar_of(body, body.response_format))
            )
            kv_params(body)
    except ValidationError:
        pass  # the server's 422
    except ApiError as error:
        assert error.status == 400
        assert str(error.message)


def read(choices: Choices, kind: Any, template: dict[str, Any]) -> Any:
    """As FastAPI reads a body: JSON first, then the model; the template is thinned out first."""
    kept = {name: value for name, value in template.items() if choices.below(8)}
    kept = {name: kept.get(name, template[name]) for name in list(template)[:1]} | (
        kept if choices.flag() else {name: kept[name] for name in kept if choices.flag()}
    )
    for name in ("messages", "input", "prompt", "text"):
        if name in template:
            kept.setdefault(name, template[name])
    text = json.dumps(choices.changed(kept, WORDS)).encode()
    try:
        value = json.loads(choices.damaged(text))
    except ValueError:
        value = json.loads(text)
    return kind.model_validate(value)


def settle(choices: Choices, body: ChatRequest) -> None:
    """All that the chat route makes of a body before it asks the engine."""
    template = choices.pick(TEMPLATES)
    traits = ModelTraits(
        think_tags=choices.pick((None, ("<think>", "</think>"))),
        template_takes_tools=template in (QWEN_LIKE, LLAMA_LIKE),
        tool_syntax=choices.pick(SYNTAXES),
    )
    tools = tool_use(body)
    text = prompt_text(body, tools, traits, tokenizer(template))
    assert isinstance(text, str)
    grammar = tools.grammar(traits.tool_syntax, grammar_of(body, body.response_format))
    think = think_params(body, traits, tools, text)
    check_sampling(sampling_params(body, {}, max_tokens=16, think=think, **grammar))
    kv_params(body)


def check_sampling(sampling: SamplingParams) -> None:
    """It crosses the wire and comes back as it was."""
    sent = msgspec.msgpack.encode(sampling)
    assert repr(msgspec.msgpack.decode(sent, type=SamplingParams)) == repr(sampling)
