"""LangChain's ChatOpenAI and litellm, unmodified, against a `zipage serve` process.

Knows nothing of how the server makes its answers.
"""

import asyncio
import json
import typing
import warnings

import pydantic
import pytest

QUESTION = "Name a colour."
MESSAGES = [{"role": "user", "content": QUESTION}]
TEXTS = ["👩‍👩‍👧 你好", "مرحبا שלום"]
GREEDY = {"temperature": 0, "max_tokens": 6}


class Choice(pydantic.BaseModel):
    """A colour."""

    colour: typing.Literal["red", "blue"]
    is_warm: bool


def weather_in(city: typing.Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather_in",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def expected(served, access):
    """What the model answers, as the plain route tells it."""
    import httpx2

    answer = httpx2.post(
        f"{access.url}/chat/completions",
        json={"messages": MESSAGES, **GREEDY},
        headers=served.headers,
        timeout=120,
    )
    return answer.json()["choices"][0]["message"]["content"]


# -- LangChain -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(access):
    """Makes a ChatOpenAI."""
    langchain_openai = pytest.importorskip("langchain_openai")

    def make(**fields):
        return langchain_openai.ChatOpenAI(
            base_url=access.url, api_key=access.key, model=access.model, **{**GREEDY, **fields}
        )

    return make


def test_langchain_answers_with_its_usage(chat, expected):
    message = chat().invoke(QUESTION)
    assert message.content == expected
    assert message.response_metadata["finish_reason"] == "length"
    assert message.usage_metadata["output_tokens"] == 6


def test_langchain_streams_and_adds_up(chat, expected):
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    assert len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == expected
    assert whole.usage_metadata["output_tokens"] == 6


def test_langchain_works_asynchronously_and_in_batches(chat, expected):
    async def work():
        model = chat()
        streamed = "".join([chunk.content async for chunk in model.astream(QUESTION)])
        return [(await model.ainvoke(QUESTION)).content, streamed]

    assert asyncio.run(work()) == [expected] * 2
    assert [message.content for message in chat().batch([QUESTION] * 3)] == [expected] * 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_reads_an_object_of_a_schema(chat, method):
    model = chat(max_tokens=80).with_structured_output(Choice, method=method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # pydantic's, of langchain's own models
        assert isinstance(model.invoke(QUESTION), Choice)


def test_langchain_calls_tools_and_streams_them(chat):
    model = chat(max_tokens=80).bind_tools(
        [weather_in], tool_choice="any", parallel_tool_calls=False
    )
    (call,) = model.invoke("Weather in Rome?").tool_calls
    assert call["name"] == "weather_in"
    assert set(call["args"]) == {"city"}
    whole = None
    for chunk in model.stream("Weather in Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert [streamed["args"] for streamed in whole.tool_calls] == [call["args"]]


def test_langchain_takes_several_choices_and_logprobs(chat):
    messages = pytest.importorskip("langchain_core.messages")
    model = chat(n=2, temperature=1, seed=3)
    (generations,) = model.generate([[messages.HumanMessage(QUESTION)]]).generations
    assert len({generation.text for generation in generations}) == 2
    message = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = message.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == message.content


@pytest.mark.parametrize("text", TEXTS)
def test_langchain_streams_any_script(chat, text):
    model = chat(max_tokens=60, extra_body={"guided_choice": [text]})
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == text


def text_of(chunks):
    """Of litellm's chunks; the one with the usage has no choice."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    return "".join(delta.content or "" for delta in deltas)


# -- litellm -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm():
    """The module, told to keep to itself."""
    module = pytest.importorskip("litellm")
    module.telemetry = False
    module.suppress_debug_info = True
    return module


@pytest.fixture(params=["openai", "hosted_vllm"])
def where(request, access):
    """How litellm is told where to ask, by either of its ways to servers of this kind."""
    return {
        "model": f"{request.param}/{access.model}",
        "api_base": access.url,
        "api_key": access.key,
        "timeout": 120,
    }


def test_litellm_answers_and_streams(litellm, where, expected):
    whole = litellm.completion(**where, messages=MESSAGES, **GREEDY)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 6
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**where, messages=MESSAGES, **GREEDY, **options))
    assert text_of(chunks) == expected
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.usage.completion_tokens == 6


def test_litellm_works_asynchronously(litellm, where, expected):
    async def work():
        answer = await litellm.acompletion(**where, messages=MESSAGES, **GREEDY)
        stream = await litellm.acompletion(**where, messages=MESSAGES, **GREEDY, stream=True)
        return answer.choices[0].message.content, text_of([chunk async for chunk in stream])

    assert asyncio.run(work()) == (expected, expected)


def test_litellm_passes_tools_and_schemas_on(litellm, where):
    messages = [{"role": "user", "content": "Weather in Rome?"}]
    fields = {"max_tokens": 80, "temperature": 0}
    answer = litellm.completion(
        **where,
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        **fields,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    answer = litellm.completion(**where, messages=messages, response_format=Choice, **fields)
    Choice.model_validate_json(answer.choices[0].message.content)


def test_litellm_streams_thoughts_apart(litellm, where):
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nLet me see"}]
    extra = {"continue_final_message": True, "thinking_token_budget": 5}
    chunks = litellm.completion(
        **where, messages=messages, temperature=0, max_tokens=16, stream=True, extra_body=extra
    )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert "think>" not in "".join(delta.content or "" for delta in deltas)


@pytest.mark.parametrize("text", TEXTS)
def test_litellm_streams_any_script(litellm, where, text):
    chunks = litellm.completion(
        **where,
        messages=MESSAGES,
        max_tokens=60,
        stream=True,
        extra_body={"guided_choice": [text]},
    )
    assert text_of(chunks) == text


def test_litellm_completes_a_text(litellm, where):
    answer = litellm.text_completion(
        **{**where, "model": where["model"].replace("openai/", "text-completion-openai/")},
        prompt="The capital of France is",
        max_tokens=3,
        temperature=0,
    )
    assert answer.choices[0].text


def test_litellm_tells_errors_apart(litellm, where):
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**where, "api_key": "wrong"}, messages=MESSAGES)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**where, messages=[])
    too_long = [{"role": "user", "content": "x " * 2000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, messages=too_long)
