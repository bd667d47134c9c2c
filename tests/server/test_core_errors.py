"""How errors look to clients, whatever causes them. Knows nothing of the routes' answers."""

import json
import logging

import pytest
from starlette.requests import Request

from zipage_lang.server.api_error import ApiError, error_response
from zipage_lang.server.sse import event_stream


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/generate", b"{", "the body is no JSON"),
        ("/generate", b"[]", "must be a JSON object"),
        ("/generate", b'{"text": 5}', "text"),
        ("/generate", b'{"text": "a", "input_ids": [1]}', "give text or input_ids"),
        ("/generate", b'{"text": []}', "0 prompts"),
        ("/generate", b'{"input_ids": []}', "the prompt has no tokens"),
        ("/generate", b'{"input_ids": [5000]}', "token id 5000"),
        ("/generate", b'{"input_ids": [-1]}', "token id -1"),
        ("/generate", b'{"text": "\\ud800"}', "lone surrogate"),
        ("/generate", b'{"text": "a", "sampling_params": {"top_p": 7}}', "top_p=7"),
        ("/generate", b'{"text": "a", "sampling_params": {"top_p": "x"}}', "top_p"),
        ("/generate", b'{"text": "a", "sampling_params": {"temperature": 1e999}}', "temperature"),
        ("/generate", b'{"text": "a", "kv": {"bugdet": 7}}', "unknown kv field 'bugdet'"),
        ("/generate", b'{"text": "a", "kv": {"budget": -7}}', "budget"),
        ("/generate", b'{"text": "a", "priority": 1e30}', "priority"),
        ("/generate", b'{"text": "a", "cache_salt": "\\ud800"}', "surrogates"),
        ("/generate", b'{"text": ["a"], "stream": true, "stream_format": "delta"}', "one prompt"),
        ("/generate", b'{"input_ids": [901]}', "refused: pool"),
        ("/tokenize", b"{}", "give prompt or messages"),
        ("/tokenize", b'{"messages": [{"role": "x", "content": "y"}]}', "refused the messages"),
        ("/detokenize", b'{"tokens": [99999999999]}', "token id 99999999999"),
        ("/release", b"{}", "request_ids"),
    ],
)
def test_a_bad_request_is_a_400_that_says_why(shared_app, path, content, message):
    headers = {"content-type": "application/json"}
    response = shared_app.request("POST", path, content=content, headers=headers)
    assert response.status_code == 400
    assert message in error_of(response)["message"]
    assert error_of(response)["type"] == "invalid_request_error"


def test_a_prompt_over_the_context_has_the_code_that_clients_look_for(shared_app, script):
    response = shared_app.post("/generate", {"input_ids": [5] * script.MAX_MODEL_LEN})
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert f"{script.MAX_MODEL_LEN} tokens" in error_of(response)["message"]


def test_unknown_routes_and_methods_have_the_same_form(shared_app):
    missing, wrong = shared_app.get("/v1/nothing"), shared_app.get("/generate")
    assert missing.status_code == 404
    assert error_of(missing)["type"] == "not_found_error"
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "does not take GET" in error_of(wrong)["message"]


def test_what_nobody_expected_is_a_500_that_names_the_request(with_app, caplog):
    async def use(app):
        @app.app.get("/broken")
        async def broken():
            raise KeyError("mine")

        return await app.get("/broken", headers={"x-request-id": "call-7"})

    response = with_app(use)
    assert response.status_code == 500
    assert "call-7" in error_of(response)["message"]
    assert "mine" not in response.text
    assert response.headers["x-request-id"] == "call-7"
    assert "KeyError: 'mine'" in caplog.text


def test_a_path_can_not_write_log_lines_of_its_own(with_app, caplog):
    caplog.set_level(logging.INFO, "zipage")

    async def use(app):
        return await app.get("/a%0A12:00:00%20INFO%20forged%1B[2J")

    assert with_app(use, starts=False, log_requests=True).status_code == 404
    (line,) = [r.getMessage() for r in caplog.records if r.name == "zipage.access"]
    assert line.startswith("GET /a%0A12:00:00%20INFO%20forged%1B%5B2J 404 in")


def test_retry_after_is_in_whole_seconds_and_never_zero():
    for seconds, told in ((0.01, "1"), (1.0, "1"), (1.2, "2")):
        response = error_response(ApiError(503, "busy", retry_after=seconds))
        assert response.headers["retry-after"] == told


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:x", True), ("", False), ("a b", False), ("x" * 200, False)]
)
def test_a_sane_request_id_comes_back_and_others_get_a_new_one(with_app, sent, kept):
    async def use(app):
        return await app.get("/health", headers={"x-request-id": sent})

    told = with_app(use, starts=False).headers["x-request-id"]
    assert told == sent if kept else told.startswith("req-")


class _Stream:
    """What became of an event stream: its status, its lines, whether its source was closed."""

    def __init__(self, with_app, source, **options):
        self.is_closed = False

        async def events():
            try:
                async for event in source():
                    yield event
            finally:
                self.is_closed = True

        async def use(app):
            @app.app.get("/events")
            async def route(request: Request):
                return await event_stream(request, events(), **options)

            return await app.get("/events")

        self.response = with_app(use, starts=False)
        self.lines = self.response.text.split("\n\n")


def test_events_are_json_or_text_and_end_with_done(with_app):
    async def source():
        yield {"text": "Füchse 你好"}
        yield "as it is\u2028still\r\nnext"

    stream = _Stream(with_app, source)
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert stream.lines == [
        'data: {"text":"Füchse 你好"}',
        "data: as it is\u2028still\ndata: next",
        "data: [DONE]",
        "",
    ]
    assert stream.is_closed


def test_a_stream_may_end_without_done(with_app):
    async def source():
        yield {"n": 1}

    assert _Stream(with_app, source, done=False).lines == ['data: {"n":1}', ""]


def test_an_error_before_the_first_event_has_its_own_status(with_app):
    async def source():
        raise ApiError(503, "busy", retry_after=3)
        yield

    stream = _Stream(with_app, source)
    assert stream.response.status_code == 503
    assert stream.response.headers["retry-after"] == "3"
    assert stream.is_closed


@pytest.mark.parametrize(
    ("error", "code"), [(ApiError(503, "gone"), 503), (ApiError(500, "x", code="broken"), "broken")]
)
def test_an_error_later_is_an_event_and_ends_the_stream(with_app, error, code):
    async def source():
        yield {"n": 1}
        raise error

    stream = _Stream(with_app, source)
    assert stream.response.status_code == 200
    first, told, done, _ = stream.lines
    assert first == 'data: {"n":1}'
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == code
    assert done == "data: [DONE]"
    assert stream.is_closed


def test_an_unexpected_error_later_does_not_tell_what_it_was(with_app, caplog):
    async def source():
        yield {"n": 1}
        raise KeyError("mine")

    stream = _Stream(with_app, source)
    assert "mine" not in stream.response.text
    assert '"code":500' in stream.response.text
    assert "KeyError: 'mine'" in caplog.text
