"""What request fields become: sampling, grammars, tools, messages, thinking; what is refused."""

import json

import pytest

from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.chat_request import ChatRequest
from zipage_lang.server.openai.conversation import template_messages, template_values
from zipage_lang.server.openai.grammar_fields import grammar_of
from zipage_lang.server.openai.model_traits import ModelTraits
from zipage_lang.server.openai.responses_request import ResponsesRequest
from zipage_lang.server.openai.sampling import kv_params, sampling_params
from zipage_lang.server.openai.thinking import think_params
from zipage_lang.server.openai.tool_formats import HERMES, LLAMA
from zipage_lang.server.openai.tool_use import ToolUse, tool_use

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
THINKER = ModelTraits(think_tags=("<think>", "</think>"), template_takes_tools=True)
PLAIN = ModelTraits()


def chat(**fields):
    return ChatRequest.model_validate({"messages": HELLO, **fields})


def test_sampling_fields_come_before_the_models_own_defaults():
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    body = chat(temperature=0, stop=["a"], logit_bias={"42": -100}, seed=3, n=2)
    sampling = sampling_params(body, recommended, max_tokens=5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.95, 20)
    assert (sampling.stop, sampling.logit_bias, sampling.seed) == (["a"], {42: -100}, 3)
    assert sampling_params(chat(), {}, max_tokens=5) == SamplingParams(max_tokens=5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop": ["a", ""]}, "stop"),
        ({"min_tokens": 9}, "min_tokens"),
    ],
)
def test_a_value_that_sampling_refuses_names_its_field(fields, param):
    with pytest.raises(ApiError) as caught:
        sampling_params(chat(**fields), {}, max_tokens=5)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_kv_fields_are_ours_and_strict():
    assert kv_params(chat()) is None
    assert kv_params(chat(kv={"mode": "fixed", "budget": 64})).budget == 64
    with pytest.raises(ApiError, match="did you mean 'budget'"):
        kv_params(chat(kv={"budgte": 64}))


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "grammar", "grammar": "root"}}, {"ebnf": "root"}),
        ({"response_format": {"type": "ebnf", "ebnf": "root"}}, {"ebnf": "root"}),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
        ),
        ({"regex": "a"}, {"regex": "a"}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_choice": ["a.", "b"]}, {"regex": r"a\.|b"}),
        ({"structured_outputs": {"choice": ["x"]}}, {"regex": "x"}),
        ({"structured_outputs": {"grammar": "root"}}, {"ebnf": "root"}),
    ],
)
def test_each_way_to_ask_for_a_form_becomes_one_grammar(fields, grammar):
    body = chat(**fields)
    assert grammar_of(body, body.response_format) == grammar


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "json_object"}, "regex": "a"},
        {"guided_choice": []},
        {"structured_outputs": {"choice": "abc"}},
    ],
)
def test_a_form_without_its_grammar_or_with_two_is_refused(fields):
    body = chat(**fields)
    with pytest.raises(ApiError):
        grammar_of(body, body.response_format)


def form_of(grammar):
    return grammar["structural_tag"]["format"]


def test_a_demanded_call_is_held_to_its_tools_schema():
    use = tool_use(chat(tools=TOOLS, tool_choice="required"))
    form = form_of(use.grammar(HERMES, {"regex": "a"}))
    assert (form["at_least_one"], form["stop_after_first"]) == (True, False)
    begin = '<tool_call>\n{"name": "f", "arguments": '
    assert form["tags"][0] == {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "}\n</tool_call>",
    }
    named = tool_use(chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}))
    form = form_of(named.grammar(LLAMA, {}))
    assert [tag["begin"] for tag in form["tags"]] == ['{"name": "g", "parameters": ']
    assert form["stop_after_first"]


def test_calls_that_may_be_made_are_free_unless_strict_or_beside_a_form():
    free = tool_use(chat(tools=TOOLS))
    assert free.grammar(HERMES, {}) == {}
    beside = form_of(free.grammar(HERMES, {"json_schema": SCHEMA}))
    assert [part["type"] for part in beside["elements"]] == ["json_schema", "tags_with_separator"]
    strict = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    form = form_of(tool_use(chat(tools=[strict, TOOLS[1]])).grammar(HERMES, {}))
    schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
    assert (form["triggers"], schemas) == (["<tool_call>"], [SCHEMA, {"type": "object"}])


def test_tool_choice_says_what_may_be_called():
    assert tool_use(chat()) == ToolUse() == tool_use(chat(tools=TOOLS, tool_choice="none"))
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    use = tool_use(
        chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    )
    assert (use.names, len(use.offered), use.must_call) == (["g"], 2, True)
    assert tool_use(chat(tools=TOOLS, parallel_tool_calls=False)).max_calls == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": TOOLS * 2},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
    ],
)
def test_tools_that_make_no_sense_are_refused(fields):
    with pytest.raises(ApiError) as caught:
        tool_use(chat(**fields))
    assert caught.value.status == 400


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK = [
    {
        "role": "developer",
        "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}],
    },
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]


def test_messages_reach_a_template_that_knows_tools_as_it_wants_them():
    system, user, assistant, tool = template_messages(
        chat(messages=TALK).messages, ToolUse(), THINKER
    )
    assert system == {"role": "system", "content": "Be brief"}
    assert user == {"role": "user", "content": "hello"}
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "hm")
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"}


def test_a_template_that_knows_no_tools_gets_them_as_text():
    use = tool_use(chat(tools=TOOLS))
    system, _, assistant, tool = template_messages(chat(messages=TALK).messages, use, PLAIN)
    assert system["content"].startswith("Be brief\n\n")
    assert json.dumps(TOOLS[0]["function"]) in system["content"]
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant["content"] == written
    assert tool == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    first, *_ = template_messages(chat().messages, use, PLAIN)
    assert first["role"] == "system"


def test_parts_that_are_no_text_are_refused():
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ApiError, match="takes text alone"):
        template_messages(chat(messages=image).messages, ToolUse(), PLAIN)


def test_effort_sets_the_templates_switches_and_the_caller_has_the_last_word():
    assert template_values(chat()) == {}
    values = template_values(chat(reasoning_effort="none", chat_template_kwargs={"thinking": True}))
    assert values == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}
    with pytest.raises(ApiError, match="can't set 'chat_template'"):
        template_values(chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}))


def test_a_thinking_model_is_watched_and_bounded_under_both_names():
    def think(prompt="user\n", traits=THINKER, **fields):
        return think_params(chat(**fields), traits, tool_use(chat(**fields)), prompt)

    assert (think().max_tokens, think().starts_inside, think().tool_starts) == (None, False, ())
    assert think("assistant\n<think>\n").starts_inside
    assert think(thinking_token_budget=5, max_thinking_tokens=9).max_tokens == 5
    assert think(max_thinking_tokens=9).max_tokens == 9
    assert think(reasoning_effort="none").max_tokens == 0
    assert think("<think>\n\n</think>\n\n", reasoning_effort="none").max_tokens is None
    assert think(tools=TOOLS).tool_starts == ("<tool_call>",)
    assert think(traits=PLAIN) is None
    assert think(traits=PLAIN, thinking_token_budget=5).max_tokens == 5
    with pytest.raises(ApiError, match="min_tokens=7 is above"):
        think(thinking_token_budget=5, min_thinking_tokens=7)


def test_a_begun_thought_is_gone_on_with():
    begun = [*HELLO, {"role": "assistant", "content": "<think>\nso"}]
    body = chat(messages=begun, continue_final_message=True, thinking_token_budget=4)
    assert think_params(body, PLAIN, ToolUse(), "assistant\n<think>\nso").starts_inside


def test_a_response_is_a_chat_request_in_other_words():
    body = ResponsesRequest.model_validate(
        {
            "instructions": "Be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call", "call_id": "c2", "name": "g"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 7,
            "top_k": 3,
        }
    ).as_chat()
    roles = [message.role for message in body.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    assistant = body.messages[2]
    assert [call.function.name for call in assistant.tool_calls] == ["f", "g"]
    assert assistant.reasoning_content == "hm"
    assert (body.max_completion_tokens, body.top_k, body.reasoning_effort) == (7, 3, "low")
    assert body.response_format.json_schema.schema_ == SCHEMA
    assert tool_use(body).names == ["f"]


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
        {"n": 2},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": []},
        {"text": {"format": {"type": "nonsense"}}},
    ],
)
def test_what_a_response_can_not_be_is_refused(fields):
    with pytest.raises(ApiError) as caught:
        ResponsesRequest.model_validate({"input": "hello", **fields}).as_chat()
    assert caught.value.status == 400
