"""What a stranger may send: heads, bodies, names and web pages that mean harm end in a refusal."""

import asyncio
import contextlib
import json
import re
import socket
import threading

import pytest
import uvicorn

from zipage_lang.server import http_protocol
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.http_protocol import BoundedHttp
from zipage_lang.server.live.routes import PAGE, headers_of
from zipage_lang.server.openai.call_reader import CallReader
from zipage_lang.server.openai.tool_calls import HermesParser
from zipage_lang.server.web_guard import hosts_of

JSON = {"content-type": "application/json"}
CHAT = '"messages": [{"role": "user", "content": "a"}], "max_tokens": 1'
OPEN_SERVER = {"api_keys": (), "admin_key": None}  # as `zipage serve` starts without flags
NAME = "<img src=x onerror=alert(1)>"


@pytest.fixture
def ask(with_server):
    """Sends requests (method, path, fields of the call), one after the other."""

    def run(requests, **options):
        async def use(server):
            return [await server.http.request(*args, **fields) for *args, fields in requests]

        return with_server(use, **{**OPEN_SERVER, **options})

    return run


# -- web pages -----------------------------------------------------------------------------------


def test_pages_of_elsewhere_may_not_use_a_server_without_keys(ask):
    """Neither by a simple request, nor by a name of their own that they make mean this machine."""
    requests = [
        ("POST", "/flush_cache", {"headers": {"origin": "https://evil.example"}}),
        ("POST", "/flush_cache", {"headers": {"origin": "null"}}),
        ("POST", "/abort_request", {"headers": {"host": "evil.example:8000"}, "json": {}}),
        ("GET", "/dashboard", {"headers": {"host": "evil.example"}}),
        ("GET", "/health", {"headers": {"host": "["}}),
        ("POST", "/flush_cache", {"headers": {"origin": "http://localhost"}}),
        ("POST", "/flush_cache", {"headers": {"host": "127.0.0.1:8000"}}),
        ("POST", "/flush_cache", {"headers": {"host": "[::1]:8000"}}),
        ("POST", "/flush_cache", {}),
    ]
    answers = ask(requests)
    assert [answer.status_code for answer in answers] == [403] * 5 + [200] * 4
    codes = [answer.json()["error"]["code"] for answer in answers[:5]]
    assert codes == ["origin_not_allowed"] * 2 + ["host_not_allowed"] * 3


def test_no_page_is_let_in_by_default_and_known_ones_are(ask):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asks = [
        ("OPTIONS", "/generate", {"headers": preflight}),
        ("GET", "/version", {"headers": {"origin": "https://a.example"}}),
    ]
    closed = ask(asks)
    opened = ask(asks, cors_origins=["https://a.example"])
    assert [answer.status_code for answer in closed] == [403, 403]
    assert not [answer for answer in closed if "access-control-allow-origin" in answer.headers]
    assert [answer.status_code for answer in opened] == [200, 200]


@pytest.mark.parametrize(
    ("settings", "has_keys", "allowed"),
    [
        ({}, False, {"localhost", "127.0.0.1", "::1"}),
        ({"host": "127.0.0.5"}, False, {"localhost", "127.0.0.1", "::1", "127.0.0.5"}),
        ({"host": "0.0.0.0"}, False, None),
        ({}, True, None),
        ({"allowed_hosts": ["Models.Example"]}, True, {"models.example"}),
        ({"allowed_hosts": ["*"]}, False, None),
    ],
)
def test_names_are_checked_where_only_names_protect(settings, has_keys, allowed):
    assert hosts_of(ServerConfig(**settings), has_keys=has_keys) == allowed


def test_the_live_page_runs_its_own_script_and_no_other():
    """Browsers run what has the hash; whatever a name or an error brings into the page has not."""
    page = PAGE.read_text()
    policy = headers_of(page)["content-security-policy"]
    assert "unsafe" not in policy
    assert re.fullmatch(r"script-src 'sha256-[\w+/=]{44}'", policy.split("; ")[1])
    changed = page.replace('"use strict";', '"use strict"; alert(1);')
    assert headers_of(changed)["content-security-policy"] != policy
    assert " style=" not in page
    assert not re.search(r"\bon(click|error|load)=", page)


def test_browsers_may_not_guess_what_an_answer_is(ask):
    """A request's name that is HTML comes back as JSON, and is taken for nothing else."""
    body = {"text": "1", "rid": NAME, "sampling_params": {"max_tokens": 1}}
    answers = ask([("POST", "/generate", {"json": body}), ("GET", f"/{NAME}", {})])
    assert NAME in answers[0].text
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\r\nb: c", "\x00", "\u202egnp.exe", "a\u2028b", "x" * 257])
def test_names_that_would_play_tricks_in_a_log_are_refused(ask, name):
    fields = ["rid", "request_id", "group_id", "parent_id"]
    requests = [("POST", "/generate", {"json": {"text": "1", field: name}}) for field in fields]
    requests += [
        ("POST", "/v1/completions", {"json": {"prompt": "1", field: name}})
        for field in ("rid", "request_id", "session_id")
    ]
    for answer in ask(requests):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in (*fields, "session_id")


def test_the_callers_request_id_can_not_write_a_header(ask):
    sent = ["a\r\nset-cookie: b", "a b", "x" * 129, "<script>", "é"]
    headers = [{"x-request-id": name.encode()} for name in sent]
    requests = [("GET", "/version", {"headers": each}) for each in headers]
    for name, answer in zip(sent, ask(requests), strict=True):
        assert answer.headers["x-request-id"] != name
        assert "set-cookie" not in answer.headers


def test_a_path_with_a_slash_more_is_no_redirect_to_whatever_the_host_says(ask):
    (answer,) = ask(
        [("POST", "/generate/", {"headers": {"host": "evil.example"}})], allowed_hosts=["*"]
    )
    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "path", ["//version", "/version/", "/dashboard%2f..%2fversion", "/;/version"]
)
def test_no_spelling_of_a_path_goes_around_the_keys(with_server, path):
    async def use(server):
        return (await server.nobody.get(path)).status_code

    assert with_server(use) == 401


# -- bodies --------------------------------------------------------------------------------------

PLACES = [
    ("/generate", "%s"),
    ("/generate", '{"text": "1", "sampling_params": {"json_schema": %s}}'),
    ("/generate", '{"text": "1", "sampling_params": {"max_tokens": 1}, "unknown": %s}'),
    ("/v1/chat/completions", "{" + CHAT + ', "json_schema": %s}'),
    ("/v1/chat/completions", "{" + CHAT + ', "chat_template_kwargs": {"x": %s}}'),
    ("/v1/chat/completions", "{" + CHAT + ', "structured_outputs": {"structural_tag": %s}}'),
    ("/tokenize", '{"messages": [{"role": "user", "content": %s}]}'),
]


@pytest.mark.parametrize("depth", [60, 300, 800, 985, 10_000, 200_000])
def test_no_depth_of_a_body_is_an_error_of_the_servers(ask, depth):
    forms = ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)
    requests = [
        ("POST", path, {"content": place % form, "headers": JSON})
        for path, place in PLACES
        for form in forms
    ]
    codes = {answer.status_code for answer in ask(requests)}
    assert codes <= {200, 400}
    if depth >= 985:
        assert codes == {400}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none_are_refused(ask, value):
    fields = ["temperature", "top_p", "presence_penalty", "repetition_penalty", "min_p", "seed"]
    bodies = [f'"{field}": {value}' for field in fields] + [f'"logit_bias": {{"1": {value}}}']
    requests = [("POST", "/v1/completions", f'{{"prompt": "1", {body}}}') for body in bodies]
    native = '{{"text": "1", "sampling_params": {{{}}}}}'
    requests += [("POST", "/generate", native.format(body)) for body in bodies]
    requests.append(("POST", "/generate", f'{{"text": "1", "priority": {value}}}'))
    asked = [(method, path, {"content": c, "headers": JSON}) for method, path, c in requests]
    assert {answer.status_code for answer in ask(asked)} == {400}


def test_of_a_key_that_comes_twice_the_last_counts(ask):
    """As for Python's and JavaScript's parsers, so that nobody on the way reads another body."""
    body = '{"text": "1", "text": "2", "sampling_params": {"max_tokens": 2}}'
    (answer,) = ask([("POST", "/generate", {"content": body, "headers": JSON})])
    assert answer.json()["text"] == "2"


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "zstd", "gzip, identity"])
def test_a_coded_body_is_not_unpacked(ask, coding):
    headers = {**JSON, "content-encoding": coding}
    (answer,) = ask([("POST", "/generate", {"content": b"\x1f\x8b\x08\x00", "headers": headers})])
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "coded_body"


@pytest.mark.parametrize(
    "unit",
    ['<tool_call>{"id":[', '<tool_call>{"id":["\\"', '<tool_call>{"type":"', "<tool_call>"],
)
def test_nested_half_calls_are_read_once_and_not_once_for_each(monkeypatch, unit):
    """A model can be made to write them; reading them holds up everybody's streams."""
    num_read, feed = 0, CallReader.feed

    def counted(self, run):
        nonlocal num_read
        num_read += len(run)
        return feed(self, run)

    monkeypatch.setattr(CallReader, "feed", counted)
    text = unit * 2000 + "}"
    parser = HermesParser()
    pieces = [*parser.feed(text), *parser.finish()]
    assert "".join(map(str, pieces)) == text
    assert num_read < 3 * len(text)  # it grew with the square, and ended in a RecursionError


# -- connections ---------------------------------------------------------------------------------


async def _echo(scope, receive, send):
    """Answers once the body is whole."""
    if scope["type"] != "http":
        return
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def port():
    """A server on loopback that has nothing but the protocol."""
    config = uvicorn.Config(
        _echo, port=0, http=BoundedHttp, lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(20)
    listener.close()


def _read_all(connection):
    connection.settimeout(20)
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            read += piece
    return read


HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize(
    "lead",
    [
        HEAD + b"x: ",
        b"GET /",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;x=",
    ],
    ids=["header", "path", "trailer", "chunk extension"],
)
def test_a_head_that_does_not_end_is_cut_off(port, lead):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(lead)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 2**26:
                sent += connection.send(b"a" * 65536)
        assert sent < 2**25
        assert b"200 OK" not in _read_all(connection)


def test_many_short_headers_are_cut_off_too(port):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(HEAD)
        with contextlib.suppress(OSError):
            for _ in range(300):
                connection.sendall(b"x: y\r\n" * 1000)
        answer = _read_all(connection)
        assert not answer or answer.startswith(b"HTTP/1.1 431 ")


def test_usual_requests_pass_however_they_are_cut(port):
    body = b"x" * 300_000
    whole = (
        HEAD + b"content-length: %d\r\n" % len(body) + b"y: " + b"z" * 30_000 + b"\r\n\r\n" + body
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for size in (7000, 65536, len(whole)):
            for start in range(0, len(whole), size):
                connection.sendall(whole[start : start + size])
        connection.sendall(HEAD + b"content-length: 0\r\nconnection: close\r\n\r\n")
        assert _read_all(connection).count(b"200 OK") == 4


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET / HT", HEAD + b"content-length: 9\r\n\r\nabc"],
    ids=["mute", "head", "body"],
)
def test_who_does_not_go_on_is_let_go_of(port, monkeypatch, begun):
    monkeypatch.setattr(http_protocol, "STALL_S", 0.2)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(begun)
        assert _read_all(connection) == b""


def test_errors_of_json_are_told_without_repeating_the_body(ask):
    secret = "my-secret-prompt"
    requests = [
        ("POST", "/generate", {"content": f'{{"text": "{secret}"', "headers": JSON}),
        ("POST", "/generate", {"content": json.dumps([secret]), "headers": JSON}),
        ("POST", "/v1/completions", {"content": b'{"prompt": "%s\xff"}' % secret.encode()}),
        ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": secret}]}}),
    ]
    for answer in ask(requests):
        assert answer.status_code == 400
        assert secret not in answer.text
