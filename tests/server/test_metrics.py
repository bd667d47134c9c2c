"""What /metrics says is what happened, in a form that Prometheus reads."""

import asyncio
import json
import re
from pathlib import Path

import httpx2
import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.runtime.messages import KVUsage, Usage
from zipage_lang.server.engine_metrics import OWNERS, EngineMetrics
from zipage_lang.server.request_metrics import RequestMetrics
from zipage_lang.server.request_record import RequestRecord

ENGINE = {
    "block_size": 8,
    "num_blocks": 128,
    "kv_mode": "fixed",
    "kv_budget": 32,
    "evict_interval": 16,
}
GRAFANA = Path(__file__).parents[2] / "docs" / "deploy" / "grafana.json"


def values_of(text):
    """{(name, labels): value} of all samples."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def served(start_real_server):
    """A server that has answered two equal prompts, one request of them streamed."""
    server = start_real_server(ENGINE)
    body = {
        "input_ids": list(range(20, 60)),
        "sampling_params": {"max_tokens": 70, "ignore_eos": True, "n": 2},
    }
    httpx2.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
    with httpx2.stream(
        "POST", f"{server.url}/generate", json={**body, "stream": True}, timeout=60
    ) as response:
        assert response.status_code == 200
        assert sum(1 for _ in response.iter_lines()) > 70
    return server


def scrape(server):
    answer = httpx2.get(f"{server.url}/metrics", timeout=20)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return values_of(answer.text)


def test_requests_tokens_and_times_are_counted(served):
    values = scrape(served)

    def value(name, **labels):
        return values[f"zipage:{name}", tuple(sorted(labels.items()))]

    assert value("engine_up") == 1
    assert value("prompt_tokens_total") == 80
    assert value("generation_tokens_total") == 280
    assert value("request_success_total", finished_reason="length") == 2
    assert value("time_to_first_token_seconds_count") == 2
    assert value("e2e_request_latency_seconds_count") == 2
    assert value("time_per_output_token_seconds_count") == 2
    assert value("inter_token_latency_seconds_count") == 2 * 69
    assert value("request_queue_time_seconds_count") == 4
    assert value("request_queue_time_seconds_bucket", le="+Inf") == 4
    assert value("request_generation_tokens_sum") == 280
    assert value("num_requests_running") == value("num_requests_waiting") == 0


def test_compactions_and_the_cache_are_counted(served):
    values = scrape(served)

    def value(name, **labels):
        return values[f"zipage:{name}", tuple(sorted(labels.items()))]

    assert value("compactions_total") == 4 * 2  # at 48 slots, and 16 later
    assert value("kv_dropped_slots_total") == 8 * 16
    assert value("compaction_seconds_total") > 0
    assert value("prefix_cache_hits_total") > 0
    assert value("cached_tokens_total") == 32
    assert 0 < value("cache_hit_rate") < 1
    assert value("request_kv_kept_ratio_count") == 4
    blocks = [value("kv_blocks", owner=owner) for owner in OWNERS]
    assert sum(blocks) == 128
    assert value("kv_blocks", owner="cached_compacted") > 0
    assert value("token_usage") == 0


def test_owners_are_named_in_the_order_of_the_census():
    from zipage_lang.radix_cache.census import Owner

    assert [owner.name.lower() for owner in Owner] == list(OWNERS)


def test_without_an_engine_only_its_absence_is_told():
    registry = CollectorRegistry()
    engine = EngineMetrics()
    registry.register(engine)
    engine.clear(num_restarts=3)
    values = values_of(generate_latest(registry).decode())
    assert values == {("zipage:engine_up", ()): 0, ("zipage:engine_restarts_total", ()): 3}


def make_record(**fields):
    return RequestRecord(request_id="r", num_prompt_tokens=10, created=100.0, **fields)


def make_output(num_tokens, finish_reason=None):
    return RequestOutput(
        request_id="r",
        prompt_token_ids=[],
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=10, completion_tokens=num_tokens, cached_tokens=4),
        kv=KVUsage(logical_len=10 + num_tokens, resident_len=10),
    )


def play(record, ends_with):
    """One request through the observer: tokens at 101, 102 and 104 s, the end at 105 s."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.on_start(record)
    record.first_token_at = 101.0
    for num_tokens, at in enumerate((101.0, 102.0, 104.0), start=1):
        output = make_output(num_tokens)
        record.last_output_at, record.outputs[0] = at, output
        metrics.on_output(record, output)
    ends_with(record)
    record.ended_at = 105.0
    metrics.on_end(record)
    return values_of(generate_latest(registry).decode())


def test_times_are_measured_from_the_record():
    values = play(make_record(), lambda record: setattr(record, "finish", "stop"))
    assert values["zipage:time_to_first_token_seconds_sum", ()] == 1.0
    assert values["zipage:inter_token_latency_seconds_sum", ()] == 3.0
    assert values["zipage:time_per_output_token_seconds_sum", ()] == 1.5
    assert values["zipage:e2e_request_latency_seconds_sum", ()] == 5.0
    assert values["zipage:cached_tokens_total", ()] == 4
    assert values["zipage:request_success_total", (("finished_reason", "stop"),)] == 1


@pytest.mark.parametrize(
    ("field", "value", "counted"),
    [
        ("error", "no", "request_errors_total"),
        ("finish", "abort", "requests_aborted_by_client_total"),
    ],
)
def test_errors_and_leavers_are_counted_apart_and_do_not_count_as_latency(field, value, counted):
    values = play(make_record(), lambda record: setattr(record, field, value))
    assert values[f"zipage:{counted}", ()] == 1
    assert values["zipage:e2e_request_latency_seconds_count", ()] == 0
    assert values["zipage:time_per_output_token_seconds_count", ()] == 0


def test_the_engine_is_asked_only_when_somebody_scrapes(with_app, monkeypatch):
    async def use(app):
        asked = []

        async def snapshot(**limits):
            asked.append(limits)
            raise TimeoutError

        monkeypatch.setattr(app.service.llm, "snapshot", snapshot)
        await app.post("/generate", {"input_ids": [5, 6]})
        await asyncio.sleep(0.2)
        before = len(asked)
        await app.get("/metrics")
        return before, asked

    before, asked = with_app(use)
    assert before == 0
    assert asked == [{"max_cells": 0, "max_nodes": 0, "max_requests": 0}]


def test_grafana_asks_for_nothing_that_is_not_there(served):
    text = GRAFANA.read_text()
    asked = set(re.findall(r"zipage:\w+", text))
    told = {name for name, _ in scrape(served)}
    # Error counts of one kind appear with their first error.
    assert asked <= told, f"not told: {sorted(asked - told)}"
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_a_scrape_while_the_engine_is_down_says_so_and_keeps_the_server_s_own(start_real_server):
    """On a server of its own: it ends what others have counted."""
    server = start_real_server(ENGINE)
    (engine,) = psutil.Process(server.pid).children()
    engine.kill()
    server.wait_for_line("the engine died")
    values = scrape(server)
    assert values["zipage:engine_up", ()] == 0
    assert ("zipage:generation_tokens_total", ()) not in values
    assert ("zipage:prompt_tokens_total", ()) in values
    server.wait_for_line("the engine is back")
    values = scrape(server)
    assert values["zipage:engine_up", ()] == 1
    assert values["zipage:engine_restarts_total", ()] == 1
