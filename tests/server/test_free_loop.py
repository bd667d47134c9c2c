"""No call's own work holds up the event loop, in which everybody's streams are told."""

import asyncio
import threading

import pytest

from zipage_lang.server import service
from zipage_lang.server.openai import chat, completions
from zipage_lang.server.openai.response_reply import ResponseReply

NUM = 40
LONG = "1" * service.LONG_TEXT
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content, **more):
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["1+2="] * NUM, "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/completions", {"prompt": ["1+2="] * NUM, "max_tokens": 1}),
    ],
)
def test_streams_go_on_between_two_of_many_prompts(with_app, monkeypatch, path, body):
    async def use(app):
        turn, encoded_at = 0, []
        tokenizer = app.service.llm.tokenizer
        encode = tokenizer.encode

        def noting(*arguments):
            encoded_at.append(turn)
            return encode(*arguments)

        async def count_turns():
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(tokenizer, "encode", noting)
        counting = asyncio.create_task(count_turns())
        answer = await app.post(path, body)
        counting.cancel()
        return answer.status_code, encoded_at

    status, encoded_at = with_app(use)
    assert status == 200
    assert len(encoded_at) == len(set(encoded_at)) == NUM


@pytest.mark.parametrize(
    ("body", "is_beside"),
    [
        ({"messages": [user("1+2=")]}, False),
        ({"messages": [user([{"type": "text", "text": "1+2="}])]}, False),
        ({"messages": [user(LONG)]}, True),
        ({"messages": [user([{"type": "text", "text": LONG}])]}, True),
        ({"messages": [user("1+2="), user("2", role="assistant", reasoning=LONG)]}, True),
        ({"messages": [user("1+2="), user(None, role="assistant", tool_calls=[CALL])]}, True),
        ({"messages": [user("1")] * 200}, True),
        ({"messages": [user("1+2=")], "tools": [TOOL]}, True),
        ({"messages": [user("1+2=")], "chat_template_kwargs": {"documents": []}}, True),
    ],
)
def test_a_template_that_may_take_long_runs_in_a_thread(with_app, monkeypatch, body, is_beside):
    threads = []

    def render_chat(*arguments, **options):
        threads.append(threading.get_ident())
        return "1+2="

    async def use(app):
        monkeypatch.setattr(app.service.llm.tokenizer, "render_chat", render_chat)
        answer = await app.post(CHAT, {"max_tokens": 4, **body})
        return answer.status_code, threading.get_ident()

    status, loop_thread = with_app(use)
    assert status == 200
    assert [thread != loop_thread for thread in threads] == [is_beside]


@pytest.mark.parametrize(
    ("path", "body", "place", "name"),
    [
        (CHAT, {"messages": [user("12+3=")]}, chat, "chat_completion"),
        ("/v1/completions", {"prompt": "12+3="}, completions, "completion"),
        ("/v1/responses", {"input": "12+3="}, ResponseReply, "whole"),
    ],
)
@pytest.mark.parametrize("long_text", [10**6, 4])
def test_a_long_answer_is_read_back_in_a_thread(
    with_app, monkeypatch, long_text, path, body, place, name
):
    threads, work = [], getattr(place, name)

    def noting(*arguments):
        threads.append(threading.get_ident())
        return work(*arguments)

    async def use(app):
        monkeypatch.setattr(place, name, noting)
        monkeypatch.setattr(service, "LONG_TEXT", long_text)
        answer = await app.post(path, body)
        return answer.status_code, threading.get_ident()

    status, loop_thread = with_app(use)
    assert status == 200
    assert [thread != loop_thread for thread in threads] == [long_text == 4]
