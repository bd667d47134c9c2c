"""Chat answers whose text is known beforehand: tools, forms of chunks, errors in OpenAI's words."""

import json

import pytest

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)


def said(text):
    return [{"role": "user", "content": text}]


def deltas_of(events, index=0):
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


def test_calls_in_the_text_are_told_as_calls(echo):
    answer = echo.post(CHAT, messages=said(CALLS), tools=TOOLS)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [
        {"name": "f", "arguments": '{"a": "}"}'},
        {"name": "f", "arguments": "{}"},
    ]
    ids = {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 2


def test_calls_stream_as_their_names_and_then_pieces_of_arguments(echo):
    deltas = deltas_of(echo.events(CHAT, messages=said(CALLS), tools=TOOLS))
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index, arguments in enumerate(('{"a": "}"}', "{}")):
        first, *rest = [call for call in calls if call["index"] == index]
        assert (first["function"]["name"], first["type"]) == ("f", "function")
        assert first["id"]
        assert all(set(call) == {"index", "function"} for call in rest)
        pieces = [call["function"]["arguments"] for call in (first, *rest)]
        assert "".join(pieces) == arguments
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."


def test_without_tools_the_same_text_is_text(echo):
    choice = echo.post(CHAT, messages=said(CALLS))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")
    assert "tool_calls" not in choice["message"]
    barred = echo.post(CHAT, messages=said(CALLS), tools=TOOLS, tool_choice="none")
    assert barred["choices"][0]["message"]["content"] == CALLS


def test_a_cut_call_ends_for_its_length(echo):
    choice = echo.post(CHAT, messages=said(CALLS), tools=TOOLS, max_tokens=59)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "}'


def test_one_call_at_a_time_where_asked_for(echo):
    answer = echo.post(CHAT, messages=said(CALLS), tools=TOOLS, parallel_tool_calls=False)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


def test_a_streams_chunks_keep_the_order_that_clients_rely_on(echo):
    events = echo.events(
        CHAT, messages=said("abc"), n=2, stream_options={"include_usage": True}, max_tokens=3
    )
    *chunks, usage = events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "abc"
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}
    assert usage["choices"] == []
    counts = usage["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (3, 6)
    assert counts["prompt_tokens_details"] == {"cached_tokens": 0}
    assert counts["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_usage_is_told_only_to_those_who_ask_and_at_every_chunk_to_those_who_want_that(echo):
    assert all("usage" not in event for event in echo.events(CHAT, messages=said("ab")))
    options = {"continuous_usage_stats": True}
    events = echo.events(CHAT, messages=said("ab"), stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3  # with the end of sequence


def test_a_stop_string_never_shows_and_is_named(echo):
    for stop in ("cd", ["x", "cd"]):
        choice = echo.post(CHAT, messages=said("abcdef"), stop=stop)["choices"][0]
        assert choice["message"]["content"] == "ab"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "cd")
    deltas = deltas_of(echo.events(CHAT, messages=said("abcdef"), stop="cd"))
    assert "".join(delta.get("content", "") for delta in deltas) == "ab"


def test_logprobs_cover_what_is_shown_and_nothing_else(echo):
    body = {"messages": said("abcdef"), "stop": "cd", "logprobs": True, "top_logprobs": 1}
    entries = echo.post(CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert entries[0]["bytes"] == [97]
    assert entries[0]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    streamed = [event["choices"][0]["logprobs"] for event in echo.events(CHAT, **body)]
    assert [entry for told in streamed if told for entry in told["content"]] == entries


def test_the_last_message_can_be_gone_on_with(echo):
    messages = [*said("x"), {"role": "assistant", "content": "and so on"}]
    answer = echo.post(CHAT, messages=messages, continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == "and so on"


def test_a_calls_arguments_reach_the_template_as_an_object(echo):
    call = {"function": {"name": "f", "arguments": '{"b":  [1]}'}}
    messages = [*said("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = echo.post(CHAT, messages=messages)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"b": [1]}


def test_ids_come_from_the_caller_or_are_new(echo):
    assert echo.post(CHAT, messages=said("a"), request_id="mine-1")["id"] == "mine-1"
    assert echo.post(CHAT, messages=said("a"), rid="mine-2")["id"] == "mine-2"
    assert echo.post(CHAT, messages=said("a"))["id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages.0.content"),
        ({"stop": 3}, "stop"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"kv": {"mode": "tight"}}, "kv"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"logit_bias": {"1000000": 1}}, None),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(echo, fields, param):
    status, error = echo.refused(CHAT, **{"messages": said("x"), **fields})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]


def test_unknown_fields_and_nulls_are_no_errors(echo):
    fields = dict.fromkeys(("temperature", "tools", "stop", "stream", "kv", "response_format"))
    answer = echo.post(CHAT, messages=said("a"), service_tier="auto", **fields)
    assert answer["choices"][0]["message"]["content"] == "a"


def test_too_much_for_the_context_has_a_code_of_its_own(echo):
    for fields in ({"messages": said("a" * 600)}, {"messages": said("a"), "max_tokens": 10_000}):
        status, error = echo.refused(CHAT, **fields)
        assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_strict_server_knows_its_own_model_alone(echo):
    (card,) = echo.get("/v1/models").json()["data"]
    assert echo.post(CHAT, messages=said("a"), model=card["id"])["model"] == card["id"]
    status, error = echo.refused(CHAT, messages=said("a"), model="gpt-9")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert echo.get(f"/v1/models/{card['id']}").json() == card
    assert set(card) >= {"id", "object", "created", "owned_by", "root", "max_model_len"}
    assert echo.get("/v1/models/gpt-9").json()["error"]["code"] == "model_not_found"


def test_an_engines_refusal_comes_before_the_stream_with_its_status(echo, refusing_prompt):
    response = echo.raw("/v1/completions", prompt=refusing_prompt, stream=True)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "refused: pool")


@pytest.fixture
def refusing_prompt():
    return [901, 4, 5]  # the scripted engine refuses it
