"""What a caller names is its own: no other can end, take up, let go of or learn of it."""

import asyncio

import pytest

from zipage_lang.server import metrics
from zipage_lang.server.live import watcher

PROMPT = [30, 31, 32]
OPERATORS = [
    ("GET", "/server_info"),
    ("POST", "/flush_cache"),
    ("GET", "/metrics"),
    ("GET", "/dashboard/data"),
]


def endless(script, **fields):
    params = {"max_tokens": 10**6}
    return {"input_ids": [script.SLOW, 30], "sampling_params": params, **fields}


def ended_by(response):
    return response.json()["meta_info"]["finish_reason"]["type"]


@pytest.mark.parametrize(
    ("names", "abort"),
    [
        ({"rid": "r"}, {"rid": "r"}),
        ({"rid": "r"}, {"request_id": "r"}),
        ({"group_id": "g"}, {"group_id": "g"}),
        ({"rid": "r"}, {"abort_all": True}),
    ],
)
def test_nobody_aborts_what_another_runs(with_server, script, running, names, abort):
    async def use(server):
        async with running(server.anna.post("/generate", endless(script, **names))) as annas:
            await server.settle(1)
            assert (await server.bert.post("/abort_request", abort)).status_code == 200
            await server.stats()  # the engine has heard of it
            assert not annas.done()
            await server.anna.post("/abort_request", abort)
            return ended_by(await annas)

    assert with_server(use) == "abort"


def test_openai_routes_have_names_of_their_callers_too(with_server, script, running):
    async def use(server):
        body = {"prompt": [script.SLOW, 30], "max_tokens": 400, "request_id": "r"}
        async with running(server.anna.post("/v1/completions", body)) as annas:
            await server.settle(1)
            await server.bert.post("/abort_request", {"rid": "r"})
            await server.stats()
            assert not annas.done()
            berts = await server.bert.post("/v1/completions", {"prompt": PROMPT, "request_id": "r"})
            await server.anna.post("/abort_request", {"rid": "r"})
            return berts.json()["id"], (await annas).json()["error"]["code"]

    assert with_server(use) == ("r", "request_aborted")


def test_two_callers_may_use_one_name_at_once(with_server, script, running):
    async def use(server):
        async with running(server.anna.post("/generate", endless(script, rid="r"))):
            await server.settle(1)
            berts = await server.bert.generate(PROMPT, rid="r")
            again = await server.anna.post("/generate", {"input_ids": PROMPT, "rid": "r"})
            return berts, again

    berts, again = with_server(use)
    assert berts["meta_info"]["id"] == "r"
    assert again.status_code == 400
    assert again.json()["error"]["message"].startswith("request_id='r' is in use")


def test_the_operator_ends_everybodys_requests_at_once(with_server, script, running):
    async def use(server):
        calls = [each.post("/generate", endless(script)) for each in (server.anna, server.bert)]
        async with running(asyncio.gather(*calls)) as both:
            await server.settle(2)
            await server.operator.post("/abort_request", {"abort_all": True})
            return [ended_by(each) for each in await both]

    assert with_server(use) == ["abort", "abort"]


@pytest.mark.parametrize("form", [{}, {"stream": True, "stream_format": "delta"}])
def test_held_states_are_taken_up_and_let_go_of_by_their_own_names(with_server, form):
    async def use(server):
        await server.anna.post("/generate", {"input_ids": PROMPT, "rid": "h", "hold": True, **form})
        seen = []
        for caller in (server.anna, server.bert):
            await caller.generate(PROMPT, parent_id="h")
            seen.append((await server.stats())["last_parent"])
            await caller.post("/release", {"request_ids": ["h"]})
            seen.append((await server.stats())["last_released"])
        return seen

    annas_parent, annas_release, berts_parent, berts_release = with_server(use)
    assert annas_parent == annas_release != berts_parent == berts_release


def test_no_answer_shows_the_engines_name_of_a_request_or_a_tenant(with_server):
    async def use(server):
        names = server.service.tenants.names
        texts = []
        for caller in (server.anna, server.bert):
            common = {"rid": "r", "group_id": "g", "hold": True, "cache_salt": "s"}
            for form in ({}, {"stream": True}, {"stream": True, "stream_format": "delta"}):
                body = {"input_ids": PROMPT, **common, **form}
                texts.append((await caller.post("/generate", body)).text)
                await caller.post("/release", {"request_ids": ["r"]})
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
                for stream in (False, True):
                    body = {"max_tokens": 3, "stream": stream, "session_id": "g", "rid": "r"}
                    body |= {"prompt": PROMPT, "input": "a"}
                    body |= {"messages": [{"role": "user", "content": "a"}]}
                    texts.append((await caller.post(path, body)).text)
            texts.append((await caller.post("/generate", {"text": "a", "parent_id": "r"})).text)
            texts.append((await caller.get("/get_model_info")).text)
        return names, texts

    names, texts = with_server(use)
    assert len(names) == 4
    assert all(texts)
    assert not [text for text in texts for name in names if name in text]


# -- operators' routes ---------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """The scripted engine sends no pictures, and nobody should wait for them here."""
    monkeypatch.setattr(metrics, "ENGINE_PATIENCE_S", 0.05)
    monkeypatch.setattr(watcher, "PATIENCE_S", 0.05)


def statuses(caller):
    return [
        caller.get(path) if method == "GET" else caller.post(path) for method, path in OPERATORS
    ]


def test_operators_routes_are_for_the_operator(with_server, impatient):
    async def use(server):
        found = {}
        for name in ("anna", "operator", "nobody"):
            answers = await asyncio.gather(*statuses(getattr(server, name)))
            found[name] = [answer.status_code for answer in answers]
            codes = {a.json()["error"]["code"] for a in answers if a.status_code == 403}
            assert codes <= {"operator_only"}
        return found

    assert with_server(use) == {"anna": [403] * 4, "operator": [200] * 4, "nobody": [401] * 4}


def test_several_keys_without_an_operator_close_operators_routes_to_all(with_server, impatient):
    async def use(server):
        answers = await asyncio.gather(*statuses(server.anna))
        return [answer.status_code for answer in answers]

    assert with_server(use, admin_key=None) == [403] * 4


def test_a_lone_key_is_its_own_operators(with_server, impatient):
    async def use(server):
        answers = await asyncio.gather(*statuses(server.anna))
        return [answer.status_code for answer in answers]

    assert with_server(use, admin_key=None, api_keys=["key-of-anna-0123456789"]) == [200] * 4


def test_an_operators_key_alone_leaves_the_other_routes_open(with_server, impatient):
    async def use(server):
        answers = await asyncio.gather(*statuses(server.nobody))
        await server.nobody.generate(PROMPT)
        operators = await asyncio.gather(*statuses(server.operator))
        return [[answer.status_code for answer in each] for each in (answers, operators)]

    assert with_server(use, api_keys=[]) == [[403] * 4, [200] * 4]


def test_scrapers_need_no_key_where_the_settings_say_so(with_server, impatient):
    async def use(server):
        callers = (server.nobody, server.anna, server.operator)
        told = [await caller.get("/metrics") for caller in callers]
        return [answer.status_code for answer in told], (await server.nobody.get("/version"))

    codes, version = with_server(use, open_metrics=True)
    assert codes == [200, 200, 200]
    assert version.status_code == 401


def test_a_refusal_does_not_repeat_the_key_that_was_sent(with_server):
    async def use(server):
        return await server.caller("a-wrong-key-of-mine").get("/version")

    response = with_server(use)
    assert response.status_code == 401
    assert "a-wrong-key" not in response.text + str(response.headers)


# -- shares --------------------------------------------------------------------------------------


def test_one_caller_can_not_fill_the_queue_for_others(with_server, script, running):
    """Of 8 places anna's share is 4: her fifth sample is a 429, bert's first is let in."""

    async def use(server):
        two = {"max_tokens": 10**6, "n": 2}
        body = endless(script) | {"sampling_params": two}
        async with running(server.anna.post("/generate", body)):
            async with running(server.anna.post("/generate", body)):
                await server.settle(2)
                refused = await server.anna.post("/generate", {"input_ids": PROMPT})
                berts = await server.bert.generate(PROMPT)
            await server.settle(1)
            again = await server.anna.generate(PROMPT)
            return refused, berts, again

    refused, *_ = with_server(use, max_waiting=0, max_samples_per_key=4)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_samples"
    assert int(refused.headers["retry-after"]) >= 1


def test_a_share_is_half_of_all_unless_it_is_set(with_server, script, running):
    async def use(server):
        most = server.service._max_samples // 2
        body = endless(script) | {"sampling_params": {"max_tokens": 10**6, "n": 8}}
        calls = [server.anna.post("/generate", body) for _ in range(most // 8)]
        async with running(asyncio.gather(*calls)):
            await server.settle(len(calls))
            refused = await server.anna.post("/generate", {"input_ids": PROMPT})
            await server.bert.generate(PROMPT)
            return refused.status_code

    assert with_server(use, max_waiting=0) == 429


def test_a_call_of_more_than_ever_fits_is_told_to_be_split_and_not_to_wait(with_server):
    async def use(server):
        prompts = [PROMPT] * 5
        return [
            await server.anna.post("/generate", {"input_ids": prompts}),
            await server.anna.post("/v1/completions", {"prompt": prompts}),
        ]

    for response in with_server(use, max_samples_per_key=4):
        assert response.status_code == 400
        assert "split it" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_priority_before_others_is_the_operators(with_server, path, body):
    async def use(server):
        callers = (server.anna, server.operator)
        asked = [await caller.post(path, {**body, "priority": -1}) for caller in callers]
        later = await server.anna.post(path, {**body, "priority": 1})
        return [answer.status_code for answer in (*asked, later)]

    assert with_server(use) == [403, 200, 200]
