"""Keys, body sizes, rates, and the settings themselves."""

import asyncio

import pytest

from zipage_lang.server.config import ServerConfig
from zipage_lang.server.limits import RateLimit

KEYS = ("first-key", "clé")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer first-key", 200),
        (b"Bearer cl\xc3\xa9", 200),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic first-key", 401),
        ("first-key", 401),
        (None, 401),
    ],
)
def test_only_those_with_a_key_are_let_in(with_app, header, status):
    async def use(app):
        headers = {} if header is None else {"authorization": header}
        return await app.get("/version", headers=headers)

    response = with_app(use, starts=False, api_keys=KEYS)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_probes_need_no_key(with_app):
    async def use(app):
        return [(await app.get(path)).status_code for path in ("/health", "/ready")]

    assert with_app(use, starts=False, api_keys=KEYS) == [200, 503]


def test_the_server_does_not_tell_its_keys(with_app):
    async def use(app):
        return await app.get("/server_info", headers={"authorization": "Bearer the-operator"})

    info = with_app(use, api_keys=KEYS, admin_key="the-operator")
    assert info.json()["server"]["api_keys"] == 2
    assert info.json()["server"]["admin_key"] is True
    assert not any(key in info.text for key in (*KEYS, "the-operator"))


@pytest.mark.parametrize("tells_length", [True, False])
@pytest.mark.parametrize(("size", "status"), [(2000, 200), (2200, 413)])
def test_a_body_over_the_limit_is_a_413_whether_or_not_it_tells_its_length(
    with_app, tells_length, size, status
):
    content = b'{"prompt": "' + b"1" * (size - 14) + b'"}'

    async def pieces():
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    async def use(app):
        headers = {"content-type": "application/json"}
        body = content if tells_length else pieces()
        return await app.client.post("/tokenize", content=body, headers=headers)

    response = with_app(use, max_body_mib=0.002)
    assert response.status_code == status
    if status == 413:
        assert "2097 bytes" in response.json()["error"]["message"]


class Rates:
    """A rate limit with a clock of its own, in front of nothing."""

    def __init__(self, per_minute):
        self.now = 0.0
        self.limit = RateLimit(
            self._answer,
            per_minute=per_minute,
            name_of=lambda scope: scope["client"][0],
            clock=lambda: self.now,
        )

    def ask(self, client="1.2.3.4", method="POST"):
        """(status, Retry-After)."""
        messages = []

        async def send(message):
            messages.append(message)

        scope = {"type": "http", "method": method, "path": "/", "client": (client, 1)}
        asyncio.run(self.limit(scope, None, send))
        return messages[0]["status"], dict(messages[0]["headers"]).get(b"retry-after")

    async def _answer(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})


def test_a_client_may_use_its_minute_at_once_and_then_waits():
    rates = Rates(per_minute=3)
    assert [rates.ask()[0] for _ in range(4)] == [200, 200, 200, 429]
    assert rates.ask()[1] == b"20"
    rates.now = 19.9
    assert rates.ask()[0] == 429
    rates.now = 20.1
    assert [rates.ask()[0] for _ in range(2)] == [200, 429]
    rates.now = 10_000.0
    assert [rates.ask()[0] for _ in range(4)] == [200, 200, 200, 429]


def test_clients_have_a_rate_each_and_reading_is_free():
    rates = Rates(per_minute=1)
    assert [rates.ask("a")[0], rates.ask("b")[0], rates.ask("a")[0]] == [200, 200, 429]
    assert rates.ask("a", method="GET")[0] == 200


@pytest.mark.parametrize(("keys", "second"), [(("k1", "k2"), 200), ((), 429)])
def test_a_key_has_a_rate_of_its_own_only_where_it_is_one_of_the_servers(with_app, keys, second):
    async def use(app):
        asks = [{"authorization": f"Bearer {key}"} for key in ("k1", "k2")]
        return [(await app.post("/tokenize", {"prompt": "1"}, headers=h)).status_code for h in asks]

    assert with_app(use, rate_limit=1, api_keys=keys) == [200, second]


def test_the_rate_limit_is_in_front_of_the_routes(with_app):
    async def use(app):
        return [await app.post("/tokenize", {"prompt": "1"}) for _ in range(2)]

    first, second = with_app(use, rate_limit=1)
    assert first.status_code == 200
    assert second.status_code == 429
    assert second.json()["error"]["type"] == "rate_limit_error"


def test_pages_of_known_origins_may_call_without_a_key_for_the_preflight(with_app):
    async def use(app):
        asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
        known = await app.client.options("/generate", headers=asks)
        other = await app.client.options(
            "/generate", headers={**asks, "origin": "https://b.example"}
        )
        return known, other

    known, other = with_app(use, starts=False, cors_origins=["https://a.example"], api_keys=KEYS)
    assert known.status_code == 200
    assert known.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"port": 70000}, "port=70000 must be a whole number from 0 to 65535"),
        ({"port": "80"}, "port='80'"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"rate_limit": 0}, "rate_limit=0"),
        ({"drain_timeout": -1.0}, "drain_timeout=-1.0"),
        ({"tool_format": "qwen"}, "auto, hermes, llama"),
        ({"host": ""}, "host=''"),
        ({"dashboard": "yes"}, "dashboard='yes' must be True or False"),
        ({"api_keys": [""]}, "api_keys must be texts that are not empty"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**fields)


def test_a_lone_key_is_a_list_of_one():
    assert ServerConfig(api_keys="abc", cors_origins=["a", "b"]).api_keys == ("abc",)
