"""openai-python, unmodified, against a `zipage serve` process: what it reads, raises, retries."""

import asyncio
import itertools
import json
import math
import typing

import openai
import pydantic
import pytest

COLOURS = [{"role": "user", "content": "Name a colour."}]
TEXTS = {
    "emoji": "👩‍👩‍👧 🇩🇪",
    "Chinese": "你好世界",
    "Arabic": "مرحبا بك",
    "Hebrew": "שלום",
}


class Choice(pydantic.BaseModel):
    colour: typing.Literal["red", "blue"]
    is_warm: bool


class weather_in(pydantic.BaseModel):
    """The weather of a city."""

    city: typing.Literal["Rome", "Oslo"]


WEATHER = [openai.pydantic_function_tool(weather_in)]
ROME = [{"role": "user", "content": "Weather in Rome?"}]


@pytest.fixture(scope="module")
def client(access):
    with openai.OpenAI(base_url=access.url, api_key=access.key, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client, access):
    """Asks for a chat answer, a short and greedy one unless told otherwise."""

    def ask(messages=COLOURS, **fields):
        fields = {"temperature": 0, "max_completion_tokens": 8, **fields}
        return client.chat.completions.create(model=access.model, messages=messages, **fields)

    return ask


def by_index(chunks):
    """{index: (text, finish reasons)} of a chat stream; each chunk must hold one choice at most."""
    told = {}
    for chunk in chunks:
        assert len(chunk.choices) <= 1
        for choice in chunk.choices:
            text, reasons = told.get(choice.index, ("", []))
            reasons = reasons + [choice.finish_reason] * bool(choice.finish_reason)
            told[choice.index] = text + (choice.delta.content or ""), reasons
    return told


def test_models_are_listed_and_found(client, access):
    (model,) = client.models.list()
    assert model.id == access.model
    assert client.models.retrieve(access.model) == model


def test_an_answer_is_whole(chat, access):
    answer = chat()
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", access.model)
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert answer._request_id


def test_a_stream_says_the_same_and_ends_with_one_usage(chat):
    whole = chat()
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert by_index(chunks) == {0: (whole.choices[0].message.content, ["length"])}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_asynchronous_client_reads_answers_and_streams_side_by_side(access, chat):
    expected = chat().choices[0].message.content

    async def whole(client):
        answer = await client.chat.completions.create(
            model=access.model, messages=COLOURS, temperature=0, max_tokens=8
        )
        return answer.choices[0].message.content

    async def streamed(client):
        stream = await client.chat.completions.create(
            model=access.model, messages=COLOURS, temperature=0, max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def work():
        async with openai.AsyncOpenAI(base_url=access.url, api_key=access.key) as client:
            return await asyncio.gather(*[whole(client), streamed(client)] * 3)

    assert asyncio.run(work()) == [expected] * 6


def test_parse_gives_an_object_of_the_schema(client, access):
    answer = client.chat.completions.parse(
        model=access.model, messages=COLOURS, response_format=Choice, max_completion_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Choice)


def test_parse_raises_where_the_answer_is_cut_off(client, access):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=access.model, messages=COLOURS, response_format=Choice, max_completion_tokens=2
        )


def test_a_tool_is_called_and_its_answer_taken(client, access, chat):
    answer = client.chat.completions.parse(
        model=access.model, messages=ROME, tools=WEATHER, tool_choice="required", temperature=0
    )
    (choice,) = answer.choices
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "weather_in"
    assert isinstance(call.function.parsed_arguments, weather_in)
    told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ROME, choice.message.model_dump(exclude_none=True), told]
    assert chat(messages, tools=WEATHER, tool_choice="none").choices[0].message.content


def test_a_tool_call_streams_in_pieces(client, access):
    named = {"type": "function", "function": {"name": "weather_in"}}
    with client.chat.completions.stream(
        model=access.model, messages=ROME, tools=WEATHER, tool_choice=named, temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    pieces = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    (call,) = final.choices[0].message.tool_calls
    assert len(pieces) > 1
    assert "".join(pieces) == call.function.arguments
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert isinstance(call.function.parsed_arguments, weather_in)


def test_three_choices_differ_and_repeat_by_seed(chat):
    fields = {"n": 3, "seed": 11, "temperature": 1, "max_completion_tokens": 6}
    fields["extra_body"] = {"ignore_eos": True}
    first, second = chat(**fields), chat(**fields)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in second.choices] == texts
    assert first.usage.completion_tokens == 18
    told = by_index(chat(**fields, stream=True))
    assert {i: text for i, (text, _) in told.items()} == dict(enumerate(texts))
    assert [reasons for _, reasons in told.values()] == [["length"]] * 3


def test_logprobs_come_with_bytes_and_alternatives(chat):
    choice = chat(logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        likelihoods = [top.logprob for top in entry.top_logprobs]
        assert likelihoods == sorted(likelihoods, reverse=True)
        assert entry.logprob == likelihoods[0]  # greedy
        assert sum(map(math.exp, likelihoods)) <= 1 + 1e-6


def test_completions_echo_and_number_their_choices(client, access):
    answer = client.completions.create(
        model=access.model,
        prompt=["one two", "three"],
        n=2,
        echo=True,
        logprobs=1,
        max_tokens=2,
        seed=1,
    )
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    starts = [choice.text[:5] for choice in answer.choices]
    assert starts == ["one t", "one t", "three", "three"]
    assert all(choice.logprobs.token_logprobs[0] is None for choice in answer.choices)


def test_responses_are_whole_and_streamed(client, access):
    fields = {"model": access.model, "input": "Name a colour.", "temperature": 0}
    fields["max_output_tokens"] = 16
    whole = client.responses.create(**fields)
    assert whole.output_text
    events = list(client.responses.create(**fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_any_script_streams_intact(chat, text):
    """The model is made to write it; most of these characters are several tokens."""
    fields = {"extra_body": {"guided_choice": [text]}, "max_completion_tokens": 60}
    assert chat(**fields).choices[0].message.content == text
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in chat([{"role": "user", "content": text}], stream=True, **fields)
    ]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_bounded_cache_is_asked_for_as_an_extra(chat):
    kv = {"mode": "fixed", "budget": 8, "interval": 8}
    answer = chat(max_completion_tokens=24, extra_body={"kv": kv, "ignore_eos": True})
    assert answer.usage.kv["compactions"] >= 1
    assert answer.usage.kv["resident_len"] < answer.usage.kv["logical_len"]


def test_leaving_a_stream_frees_its_blocks(chat, served):
    before = served.wait_idle()["num_aborted"]
    with chat(stream=True, max_completion_tokens=900, extra_body={"ignore_eos": True}) as stream:
        list(itertools.islice(stream, 3))
        assert served.info()["num_running"] == 1
    assert served.wait_idle()["num_aborted"] == before + 1


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": [{"role": "user", "content": "x " * 2000}]}, "context_length_exceeded", None),
        ({"temperature": -1}, None, "temperature"),
        ({"messages": []}, None, "messages"),
        ({"tools": WEATHER, "tool_choice": "often"}, None, "tool_choice"),
    ],
)
def test_what_is_wrong_with_a_request_is_told(chat, fields, code, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(**fields)
    error = caught.value
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert error.code == code
    assert param is None or error.param == param
    assert error.request_id


def test_other_mistakes_have_their_own_exceptions(client, access):
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=access.model, input="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def of(server, **options):
    """A client of a server that asks for no key."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, **options)


@pytest.fixture(scope="module")
def without_a_queue(scripted):
    """64 rows in front of the scripted engine, and no place to wait."""
    return scripted(max_waiting=0)


def test_it_waits_as_told_when_its_requests_are_too_many(scripted):
    """429: a bucket of 60 a minute, so that one is let in again after a second."""
    server = scripted(rate_limit=60)
    ask = {"model": "x", "prompt": [7, 8], "max_tokens": 1}
    with of(server, max_retries=0) as impatient, of(server, max_retries=5) as patient:
        with pytest.raises(openai.RateLimitError) as caught:
            all(impatient.completions.create(**ask) for _ in range(200))
        assert caught.value.code == "rate_limit_exceeded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 2
        assert patient.completions.create(**ask).choices


def test_a_stream_tells_of_a_dying_engine_and_a_retry_finds_the_next(without_a_queue, script):
    server = without_a_queue
    ask = {"model": "x", "max_tokens": 4}
    with of(server, max_retries=0) as impatient, of(server, max_retries=5) as patient:
        with pytest.raises(openai.APIError) as caught:
            list(impatient.completions.create(**ask, prompt=[script.KILL, 7], stream=True))
        assert caught.value.code == "engine_died"
        assert patient.completions.create(**ask, prompt=[7, 8]).choices
    assert server.info()["num_restarts"] == 1


def test_an_overloaded_server_says_so_and_a_retry_gets_through(without_a_queue, script):
    server = without_a_queue
    num_before = server.info().get("AddRequest", 0)
    stall = {"model": "x", "prompt": [script.STALL], "n": 64, "max_tokens": 9}
    ask = {"model": "x", "prompt": [7, 8], "max_tokens": 4}

    async def work():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            holding = asyncio.create_task(client.completions.create(**stall))
            while server.info().get("AddRequest", 0) == num_before:
                await asyncio.sleep(0.02)
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**ask)
            waiting = asyncio.create_task(
                client.with_options(max_retries=5).completions.create(**ask)
            )
            await asyncio.sleep(0.2)
            holding.cancel()
            return caught.value, await waiting

    error, answer = asyncio.run(work())
    assert (error.status_code, error.code) == (503, "overloaded")
    assert int(error.response.headers["retry-after"]) >= 1
    assert answer.choices
