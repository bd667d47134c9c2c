"""Streams as clients read them whose idea of a line is Unicode's. Knows nothing of engines."""

import asyncio
import json

import httpx2
from starlette.applications import Starlette
from starlette.routing import Route

from zipage_lang.server.sse import NamedEvent, event_stream

TEXT = "a\u2028b\u2029c\u0085d\x0be\x1cf"


def streamed_lines(*events):
    async def said():
        for event in events:
            yield event

    async def stream(request):
        return await event_stream(request, said())

    async def read():
        transport = httpx2.ASGITransport(app=Starlette(routes=[Route("/", stream)]))
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get("/")).text.splitlines()  # as HTTPX cuts lines

    return asyncio.run(read())


def test_an_event_is_one_line_wherever_unicode_would_cut_it():
    plain, _, done, _ = streamed_lines({"text": TEXT})
    assert json.loads(plain.removeprefix("data: ")) == {"text": TEXT}
    assert done == "data: [DONE]"
    kind, named, *_ = streamed_lines(NamedEvent(type="delta", text=TEXT))
    assert kind == "event: delta"
    assert json.loads(named.removeprefix("data: "))["text"] == TEXT
