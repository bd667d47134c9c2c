"""What the page is told: lengths and counts, once per interval, and nothing while nobody asks."""

import asyncio
import json

import msgspec

from zipage_lang.runtime.snapshot import BlockGrid, CompactionView, Snapshot
from zipage_lang.server.live import watcher

ENGINE = {"block_size": 8, "num_blocks": 64, "kv_mode": "fixed", "kv_budget": 16}
STATS = {
    "num_decoded_tokens": 7,
    "num_prefilled_tokens": 3,
    "num_running": 1,
    "num_waiting": 0,
    "num_tokens_asked": 10,
    "num_tokens_hit": 4,
}


def make_snapshot(**fields):
    grid = BlockGrid(
        block_size=8, num_blocks=2, num_by_owner=[2] + [0] * 6, stride=1, cells=b"\0\0"
    )
    empty = Snapshot(
        step=1,
        taken_s=0.0001,
        stats=STATS,
        grid=grid,
        nodes=[],
        num_nodes=0,
        requests=[],
        num_requests=0,
        logical_len=0,
        resident_len=0,
        compactions=[],
    )
    return msgspec.structs.replace(empty, **fields)


def counting(app, monkeypatch, snapshot, delay_s=0.0):
    """The engine answers with `snapshot`; the list tells how often it was asked."""
    asked = []

    async def take(**limits):
        asked.append(limits)
        await asyncio.sleep(delay_s)
        return snapshot

    monkeypatch.setattr(app.service.llm, "snapshot", take)
    return asked


def test_many_watchers_share_one_picture(with_app, monkeypatch):
    async def use(app):
        asked = counting(app, monkeypatch, make_snapshot(), delay_s=0.05)
        answers = await asyncio.gather(*(app.get("/dashboard/data") for _ in range(20)))
        again = await app.get("/dashboard/data")
        await asyncio.sleep(0.4)
        num_idle = len(asked)
        await app.get("/dashboard/data")
        return [each.status_code for each in (*answers, again)], num_idle, len(asked)

    statuses, num_idle, num_asked = with_app(use)
    assert set(statuses) == {200}
    assert num_idle == 1  # time alone takes no picture
    assert num_asked == 2


def test_a_costly_picture_is_taken_less_often(with_app, monkeypatch):
    async def use(app):
        counting(app, monkeypatch, make_snapshot(taken_s=0.05))
        return (await app.get("/dashboard/data")).json()["interval_s"]

    assert with_app(use) == 0.05 / watcher.MAX_SHARE


def test_a_new_engine_is_looked_at_at_once(with_app, monkeypatch):
    """Its compactions are counted from 1 again: the last picture of the old one would mislead."""

    async def use(app):
        counting(app, monkeypatch, make_snapshot(step=900, taken_s=0.05))
        await app.get("/dashboard/data")
        counting(app, monkeypatch, make_snapshot(step=2))
        before = (await app.get("/dashboard/data")).json()
        app.service._supervisor.num_restarts += 1
        return before, (await app.get("/dashboard/data")).json()

    before, after = with_app(use)
    assert (before["num_restarts"], before["snapshot"]["step"]) == (0, 900)
    assert (after["num_restarts"], after["snapshot"]["step"]) == (1, 2)


def test_a_slow_engine_does_not_hold_the_page_up(with_app, monkeypatch):
    monkeypatch.setattr(watcher, "PATIENCE_S", 0.05)

    async def use(app):
        counting(app, monkeypatch, make_snapshot(), delay_s=0.3)
        first = (await app.get("/dashboard/data")).json()
        await asyncio.sleep(0.4)
        return first, (await app.get("/dashboard/data")).json()

    first, second = with_app(use)
    assert first["snapshot"] is None
    assert first["state"] == "ready"
    assert second["snapshot"]["step"] == 1


def test_only_what_is_new_is_sent(with_app, monkeypatch):
    compactions = [CompactionView(number, 1, 0, 40, 30, 20) for number in (1, 2, 3)]

    async def use(app):
        counting(app, monkeypatch, make_snapshot(compactions=compactions))
        whole = (await app.get("/dashboard/data")).json()
        since = whole["history"][-1][0]
        rest = (await app.get(f"/dashboard/data?after=2&since={since}")).json()
        return whole, rest

    whole, rest = with_app(use)
    assert [each[0] for each in whole["snapshot"]["compactions"]] == [1, 2, 3]
    assert [each[0] for each in rest["snapshot"]["compactions"]] == [3]
    assert len(whole["history"]) == 1
    assert rest["history"] == []
    assert dict(zip(whole["fields"]["moment"], whole["history"][0], strict=True))["num_hit"] == 4


def test_before_the_engine_is_up_the_page_is_told_so(with_app):
    async def use(app):
        return (await app.get("/dashboard/data")).json()

    data = with_app(use, starts=False)
    assert (data["state"], data["snapshot"], data["engine"]) == ("starting", None, None)


def test_the_page_can_be_switched_off(with_app):
    async def use(app):
        return [(await app.get(path)).status_code for path in ("/dashboard", "/dashboard/data")]

    assert with_app(use, starts=False, dashboard=False) == [404, 404]


def test_the_data_want_a_key_and_the_page_does_not(with_app):
    async def use(app):
        paths = ("/dashboard", "/dashboard/data")
        without = [(await app.get(path)).status_code for path in paths]
        headers = {"authorization": "Bearer sesame"}
        return without, (await app.get(paths[1], headers=headers)).status_code

    assert with_app(use, starts=False, api_keys=["sesame"]) == ([200, 401], 200)


def test_strange_parameters_are_refused(with_app):
    async def use(app):
        paths = ("after=-1", "after=x", "since=nan", "since=-1")
        return [(await app.get(f"/dashboard/data?{each}")).status_code for each in paths]

    assert with_app(use, starts=False) == [400, 400, 400, 400]


def test_no_token_no_text_and_no_request_id_is_told(start_real_server):
    import httpx2

    server = start_real_server(ENGINE)
    body = {
        "input_ids": [101, 102, 103, 104, 105, 106, 107, 108, 109],
        "request_id": "sesame",
        "sampling_params": {"max_tokens": 60, "ignore_eos": True},
        "stream": True,
    }
    with httpx2.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        text = httpx2.get(f"{server.url}/dashboard/data", timeout=20).text
        assert sum(1 for _ in lines) > 0
    data = json.loads(text)
    assert data["snapshot"]["num_requests"] == 1
    assert "sesame" not in text
    assert "101,102" not in text.replace(" ", "")
    assert len(text) < 20_000
