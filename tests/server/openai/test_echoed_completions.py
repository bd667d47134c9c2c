"""Completions whose text is known beforehand: forms of prompts, echo, legacy fields, responses."""

import asyncio
import json

import pytest

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
A, B, C = 70, 71, 72  # "a", "b", "c" of the tokenizer


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([A, B], ["ab"]),
        ([[A], [B, C]], ["a", "bc"]),
    ],
)
def test_a_prompt_comes_in_four_forms(echo, prompt, texts):
    answer = echo.post(COMPLETIONS, prompt=prompt, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
    told = [choice["text"] for choice in answer["choices"]]
    assert told == [text for text in texts for _ in range(2)]
    events = echo.events(COMPLETIONS, prompt=prompt, n=2)
    assert {event["object"] for event in events} == {"text_completion"}
    for index, text in enumerate(told):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


@pytest.mark.parametrize("echoes", [False, True])
@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1, "a"], 7, ["a", [1]], [-1], [5000], [10**14], [True]]
)
def test_anything_else_is_no_prompt(echo, prompt, echoes):
    status, error = echo.refused(COMPLETIONS, prompt=prompt, echo=echoes)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] in (None, "prompt")


def test_sixteen_tokens_are_told_without_a_limit(echo):
    answer = echo.post(COMPLETIONS, prompt=[A] * 40)
    assert answer["choices"][0]["text"] == "a" * 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


def test_an_echo_leads_the_text_and_its_tokens_the_logprobs(echo):
    answer = echo.post(COMPLETIONS, prompt=[A, B, C], echo=True, logprobs=1, max_tokens=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abca"
    lists = choice["logprobs"]
    assert lists["tokens"] == ["a", "b", "c", "a"]
    assert lists["token_logprobs"] == [None, -1.0, -1.0, -0.5]
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][3] == {"a": -0.5}
    assert lists["text_offset"] == [0, 1, 2, 3]
    events = echo.events(COMPLETIONS, prompt=[A, B, C], echo=True, logprobs=1, max_tokens=1)
    assert "".join(event["choices"][0]["text"] for event in events) == "abca"
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [x for told in streamed for x in told[name]] for name in lists} == lists


def test_no_output_at_all_can_be_asked_for(echo):
    answer = echo.post(COMPLETIONS, prompt=[A, B], echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 2


def test_the_end_of_sequence_counts_as_a_generated_token(echo):
    """lm-eval cuts one generated token off, whichever it is."""
    lists = echo.post(COMPLETIONS, prompt="a", logprobs=1)["choices"][0]["logprobs"]
    assert len(lists["tokens"]) == 3  # bos and "a" again, then the end


@pytest.mark.parametrize("fields", [{"suffix": "z"}, {"best_of": 3}, {"n": 2, "best_of": 1}])
def test_legacy_fields_are_refused_rather_than_ignored(echo, fields):
    status, error = echo.refused(COMPLETIONS, prompt="a", **fields)
    assert (status, error["param"]) == (400, "suffix" if "suffix" in fields else "best_of")
    assert echo.post(COMPLETIONS, prompt="a", best_of=1, suffix="")["choices"]


def test_too_many_choices_in_one_call_are_refused(echo):
    status, error = echo.refused(COMPLETIONS, prompt=["a"] * 100, n=100)
    assert (status, error["param"]) == (400, "prompt")


def test_an_aborted_answer_is_an_error_and_never_looks_whole(echo, script):
    async def work():
        body = {"prompt": [script.SLOW, A], "max_tokens": 500, "request_id": "slow"}
        answer = asyncio.ensure_future(echo.client.post(COMPLETIONS, json=body))
        streamed = echo.client.post(
            COMPLETIONS, json={**body, "request_id": "slow-2", "session_id": "us", "stream": True}
        )
        stream = asyncio.ensure_future(streamed)
        while len(echo.service.records) < 2 or not all(
            record.outputs for record in echo.service.records if record.request_id == "slow-2"
        ):
            await asyncio.sleep(0.01)
        await echo.client.post("/abort_request", json={"rid": "slow"})
        await echo.client.post("/abort_request", json={"group_id": "us"})
        return await answer, await stream

    answer, stream = echo.run(work())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "request_aborted"
    *_, error, end = stream.text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_aborted"
    assert end == "data: [DONE]"


def responses_events(echo, **body):
    response = echo.raw(RESPONSES, stream=True, **body)
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def test_a_response_has_its_text_where_clients_look_for_it(echo):
    answer = echo.post(RESPONSES, input="hello", metadata={"a": "b"})
    assert (answer["object"], answer["status"]) == ("response", "completed")
    assert answer["output"][0]["content"][0]["text"] == "hello"
    assert answer["metadata"] == {"a": "b"}
    assert answer["usage"]["output_tokens"] == 6
    cut = echo.post(RESPONSES, input="hello", max_output_tokens=2)
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )


def test_a_responses_events_add_up_to_the_response(echo):
    events = responses_events(echo, input="hello")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 5,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(deltas) == "hello"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert events[2]["item"]["content"] == []


def test_a_responses_calls_are_items_of_their_own(echo):
    text = 'Hm. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    events = responses_events(echo, input=text, tools=tools)
    message, call = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Hm."
    assert (call["name"], call["arguments"], call["status"]) == ("f", '{"a": 1}', "completed")
    kind = "response.function_call_arguments.delta"
    assert "".join(event["delta"] for event in events if event["type"] == kind) == '{"a": 1}'
    assert echo.post(RESPONSES, input=text, tools=tools)["output"][1]["arguments"] == '{"a": 1}'


def test_a_response_that_needs_an_older_one_is_refused(echo):
    status, error = echo.refused(RESPONSES, input="a", previous_response_id="resp_1")
    assert (status, error["param"]) == (400, "previous_response_id")
    assert "keeps no responses" in error["message"]
