"""The routes in front of a real model: grammars, thinking, seeds, likelihoods, shared prefixes."""

import itertools
import json

import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
QUESTION = [{"role": "user", "content": "Name a colour."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "size": {"enum": ["s", "l"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather_in", "parameters": CITY}}]


def streamed(api, **body):
    """(thought, text, [arguments of each call], finish reasons) of a chat stream."""
    thought, text, calls, reasons = "", "", {}, []
    for event in api.events(CHAT, **body):
        (choice,) = event["choices"]
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        thought += delta.get("reasoning") or ""
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            calls.setdefault(call["index"], []).append(call["function"]["arguments"])
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return thought, text, ["".join(parts) for parts in calls.values()], reasons


def test_a_stream_says_what_the_whole_answer_says(api):
    body = {"messages": QUESTION, "temperature": 0, "max_completion_tokens": 6}
    whole = api.post(CHAT, **body, logprobs=True, top_logprobs=2)["choices"][0]
    content = whole["message"]["content"]
    assert streamed(api, **body) == ("", content, [], ["length"])
    entries = whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries)


def test_choices_of_one_seed_differ_and_repeat(api):
    body = {"messages": QUESTION, "seed": 11, "n": 3, "max_tokens": 4, "ignore_eos": True}

    def texts(answer):
        return [choice["message"]["content"] for choice in answer["choices"]]

    first, second = api.post(CHAT, **body), api.post(CHAT, **body)
    assert texts(first) == texts(second)
    assert len(set(texts(first))) == 3
    assert texts(api.post(CHAT, **{**body, "seed": 12})) != texts(first)
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["usage"]["completion_tokens"] == 12
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}},
        {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": CITY},
        },
    ],
)
def test_an_answer_keeps_to_its_schema(api, response_format):
    body = {"messages": QUESTION, "max_tokens": 60, "response_format": response_format, "seed": 1}
    value = json.loads(api.post(CHAT, **body)["choices"][0]["message"]["content"])
    assert set(value) == {"city", "size"}


def test_other_grammars_bind_as_well(api):
    def text(**fields):
        answer = api.post(CHAT, messages=QUESTION, max_tokens=40, seed=2, **fields)
        return answer["choices"][0]["message"]["content"]

    assert text(response_format={"type": "regex", "regex": "(red|blue)!"}) in ("red!", "blue!")
    assert text(response_format={"type": "grammar", "grammar": 'root ::= "x" "y"'}) == "xy"
    assert text(guided_choice=["a (b)", "c|d"]) in ("a (b)", "c|d")
    assert api.post(COMPLETIONS, prompt="It is", regex="[0-9]{3}")["choices"][0]["text"].isdigit()


def test_a_bad_grammar_is_told(api):
    for fields in ({"regex": "("}, {"response_format": {"type": "grammar", "grammar": "x"}}):
        status, error = api.refused(CHAT, messages=QUESTION, **fields)
        assert status == 400
        assert "bad" in error["message"]


def test_a_demanded_call_is_made_and_fits_its_schema(api):
    body = {
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    choice = api.post(CHAT, **body, tool_choice="required")["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert set(json.loads(call["function"]["arguments"])) == {"city", "size"}
    named = {"type": "function", "function": {"name": "weather_in"}}
    arguments = [call["function"]["arguments"]]
    assert streamed(api, **body, tool_choice=named) == ("", "", arguments, ["tool_calls"])


def test_thinking_is_told_apart_bounded_and_counted(api):
    messages = [*QUESTION, {"role": "assistant", "content": "<think>\nLet me see"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "thinking_token_budget": 6,
        "max_completion_tokens": 20,
        "temperature": 0,
        "logprobs": True,
    }
    answer = api.post(CHAT, **body)
    choice = answer["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] != ""
    assert "think>" not in message["reasoning"] + message["content"]
    details = answer["usage"]["completion_tokens_details"]
    assert 6 <= details["reasoning_tokens"] <= 14  # the end tag and its newlines too
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == message["content"]
    told = (message["reasoning"], message["content"], [], [choice["finish_reason"]])
    assert streamed(api, **body) == told


def test_a_grammar_waits_for_the_end_of_thinking(api):
    messages = [*QUESTION, {"role": "assistant", "content": "<think>\nLet me see"}]
    answer = api.post(
        CHAT,
        messages=messages,
        continue_final_message=True,
        max_thinking_tokens=5,
        regex="[0-9]{4}",
        max_tokens=40,
        seed=5,
    )
    message = answer["choices"][0]["message"]
    assert message["content"].isdigit()
    assert len(message["content"]) == 4
    assert message["reasoning"]


def test_echoed_likelihoods_are_those_of_drawing_the_tokens(api):
    """As lm-eval sends and reads it: token ids, echo, one token, the last one cut off."""
    prompt = api.post("/tokenize", prompt="The capital of France is")["tokens"]
    drawn = api.post(COMPLETIONS, prompt=prompt, max_tokens=5, temperature=0, logprobs=1)
    drawn_logprobs = drawn["choices"][0]["logprobs"]
    continuation = api.post("/tokenize", prompt=drawn["choices"][0]["text"])["tokens"]
    assert len(continuation) == 5
    ids = prompt + continuation
    answer = api.post(
        COMPLETIONS,
        prompt=[ids, prompt],
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        seed=1234,
    )
    first = answer["choices"][0]["logprobs"]
    assert len(first["tokens"]) == len(ids) + 1
    own = first["token_logprobs"][len(prompt) : -1]
    assert own == pytest.approx(drawn_logprobs["token_logprobs"], abs=1e-4)
    tops = first["top_logprobs"][len(prompt) : -1]
    assert [max(top.values()) for top in tops] == own  # each was the greedy choice
    assert first["token_logprobs"][0] is None
    offsets = [offset for offset, _ in itertools.pairwise(first["text_offset"])]
    assert offsets == sorted(offsets)
    assert answer["choices"][0]["text"].startswith("The capital of France is")


@pytest.mark.parametrize("text", ["Grüße, 你好", "👩‍👩‍👧 🇩🇪", "مرحبا"])
def test_any_script_streams_intact(api, text):
    """The model is made to write it, by a grammar: most characters take several tokens."""
    body = {"messages": QUESTION, "guided_choice": [text], "max_tokens": 60, "temperature": 0}
    chunks = api.events(CHAT, **body, logprobs=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    told = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    data = [bytes(entry["bytes"]) for entries in told for entry in entries]
    assert len(data) > len(text) // 2
    assert b"".join(data).decode() == text


def test_a_bounded_cache_is_asked_for_and_told(api):
    kv = {"mode": "fixed", "budget": 8, "interval": 8}
    answer = api.post(CHAT, messages=QUESTION, max_tokens=24, kv=kv, ignore_eos=True)
    counts = answer["usage"]["kv"]
    assert counts["compactions"] >= 1
    assert counts["resident_len"] < counts["logical_len"]


def test_salted_requests_share_nothing(api):
    body = {"prompt": "one two three four five six seven eight nine ten " * 3, "max_tokens": 1}

    def cached(**fields):
        usage = api.post(COMPLETIONS, **body, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0
