"""What a server says to our HTTP client: its JSON, or an error that blames the right side.

Knows nothing of what is asked.
"""

import asyncio
import json

import httpx2
import pytest

from zipage_lang.errors import ServerError
from zipage_lang.http_client import HttpClient


@pytest.fixture
def asked():
    """asked(work, status, body): what `await work(client)` gives when the server answers so."""

    def ask(work, status, body):
        client = HttpClient("http://server", api_key=None, timeout_s=5.0)
        answer = httpx2.Response(status, content=body)
        client._options["transport"] = httpx2.MockTransport(lambda _: answer)
        client._client = httpx2.AsyncClient(**client._options)
        return asyncio.run(work(client))

    return ask


async def events(client):
    return [event async for event in client.events("/generate", {})]


async def post(client):
    return await client.post("/release", {})


def test_a_text_with_unicode_line_ends_is_one_event(asked):
    event = {"text": "a\u2028b\u2029c\u0085d"}
    stream = f"data: {json.dumps(event, ensure_ascii=False)}\n\ndata: [DONE]\n\n"
    assert asked(events, 200, stream.encode()) == [event]


@pytest.mark.parametrize("said", ["{", "[1]", "nul", "3", '"text"', "[" * 50_000, "<html>"])
def test_an_event_that_is_no_object_blames_the_server(asked, said):
    with pytest.raises(ServerError, match="no answer to what was asked"):
        asked(events, 200, f"data: {said}\n\ndata: [DONE]\n\n".encode())


@pytest.mark.parametrize("said", [b"{", b"[1]", b"<html>", b"\xff", b"[" * 50_000])
def test_an_answer_that_is_no_object_blames_the_server(asked, said):
    with pytest.raises(ServerError, match="no answer to what was asked"):
        asked(post, 200, said)


def test_an_answer_without_content_is_an_empty_object(asked):
    assert asked(post, 204, b"") == {}


@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirect_is_an_error_with_its_status_not_an_answer(asked, status):
    for work in (events, post):
        with pytest.raises(ServerError) as caught:
            asked(work, status, b'data: {"text": "a"}\n\ndata: [DONE]\n\n')
        assert caught.value.status == status


@pytest.mark.parametrize("error", [{"message": ""}, {"code": 500}, {"message": None}, "", []])
def test_an_error_without_a_message_still_says_something(asked, error):
    with pytest.raises(ServerError) as caught:
        asked(post, 500, json.dumps({"error": error}).encode())
    assert str(caught.value).removeprefix("http://server/release: ")


@pytest.mark.parametrize("said", [b"{", b"<html>", b'{"error": {"message": "no"}}'])
def test_an_error_keeps_its_status_whatever_it_says(asked, said):
    with pytest.raises(ServerError) as caught:
        asked(events, 503, said)
    assert caught.value.status == 503
    assert caught.value.retryable
    with pytest.raises(ValueError, match="http://server/generate"):
        asked(events, 422, said)
