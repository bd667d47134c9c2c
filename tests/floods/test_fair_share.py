"""Tenants that wait share the engine by tokens, within a bound; one tenant alone sees no change.

The bound, for two tenants that wait all the time: over any stretch what they were given differs by
at most 2 * (P + R * O) tokens: P the longest prompt, R max_running, O the longest output.
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_support.random_loads import random_load
from test_support.simulation import World
from test_support.tenants import TenantsByName, TenantSimulation, largest_gap, tenant_request

from zipage_lang.runtime.config import CompressionConfig, SchedulerConfig
from zipage_lang.runtime.fair_share import FairShare
from zipage_lang.runtime.request import Request
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.waiting_queue import LOOKAHEAD, WaitingQueue


def make_world(*, max_running=4, order="fcfs", **fields):
    scheduler = SchedulerConfig(
        max_running=max_running, max_step_tokens=64, order=order, max_skips=3
    )
    roomy = {"num_blocks": 200, "block_size": 4, "prefix_caching": order == "lpm"}
    return World(scheduler=scheduler, **{**roomy, **fields})


def flood(simulation, tenant, count, **shape):
    for index in range(count):
        simulation.add(tenant_request(tenant, index, **shape))


def run_while(simulation, condition, max_steps=5000):
    """Step while the condition holds; what the tenants a and b were given after each step."""
    history = []
    for _ in range(max_steps):
        if not condition():
            return history
        simulation.step()
        history.append((simulation.service("a"), simulation.service("b")))
    raise AssertionError(f"still so after {max_steps} steps")


SHAPES = [
    ({"prompt_len": 12, "max_tokens": 20}, {"prompt_len": 2, "max_tokens": 1}),
    ({"prompt_len": 2, "max_tokens": 30}, {"prompt_len": 30, "max_tokens": 1}),
    ({"prompt_len": 4, "max_tokens": 4}, {"prompt_len": 4, "max_tokens": 4, "n": 3}),
]


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
@pytest.mark.parametrize(("shape_a", "shape_b"), SHAPES)
def test_two_tenants_that_wait_are_given_equal_shares_within_the_bound(shape_a, shape_b, order):
    simulation = TenantSimulation(make_world(order=order))
    flood(simulation, "a", 60, **shape_a)
    flood(simulation, "b", 500 if shape_b["max_tokens"] == 1 else 60, **shape_b)
    history = run_while(
        simulation, lambda: simulation.num_waiting("a") and simulation.num_waiting("b")
    )
    longest_prompt = max(shape_a["prompt_len"], shape_b["prompt_len"])
    longest_output = max(shape_a["max_tokens"], shape_b["max_tokens"])
    bound = 2 * (longest_prompt + 4 * longest_output)
    assert sum(history[-1]) > 4 * bound, "too short a load to show anything"
    assert largest_gap(history) <= bound


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
def test_ten_short_requests_do_not_wait_for_a_thousand_long_ones(order):
    simulation = TenantSimulation(make_world(order=order, num_blocks=400))
    flood(simulation, "crowd", 1000, prompt_len=30, max_tokens=8)
    for _ in range(40):
        simulation.step()
    num_before, running = len(simulation.order_admitted), 4
    assert 0 < num_before < 500
    flood(simulation, "few", 10, prompt_len=4, max_tokens=4)
    run_while(simulation, lambda: len([i for i in simulation.order_ended if "few" in i]) < 10)
    since = simulation.order_admitted[num_before:]
    first = next(place for place, name in enumerate(since) if name.startswith("few"))
    assert first <= running, f"the first of the few began behind {first} others"
    crowd_given = 38 * sum(name.startswith("crowd") for name in since)
    few_given, bound = 10 * 8, 30 + running * 8
    assert crowd_given <= few_given + 2 * bound + running * 38


def test_the_same_ten_of_the_same_tenant_wait_their_turn():
    """What the fairness test would see without tenants."""
    simulation = TenantSimulation(make_world())
    flood(simulation, "crowd", 200, prompt_len=8, max_tokens=4)
    for index in range(200, 210):
        simulation.add(tenant_request("crowd", index))
    simulation.run_until_idle(3000)
    assert simulation.order_admitted == [f"crowd-{index}" for index in range(210)]


def test_a_tenant_that_was_idle_has_saved_nothing_up():
    simulation = TenantSimulation(make_world())
    simulation.add(tenant_request("b", 1000, max_tokens=1))
    flood(simulation, "a", 100, prompt_len=8, max_tokens=12)
    while simulation.service("a") < 1000:
        simulation.step()
    flood(simulation, "b", 100, prompt_len=8, max_tokens=12)
    history = run_while(
        simulation, lambda: simulation.num_waiting("a") and simulation.num_waiting("b")
    )
    assert largest_gap(history) <= 2 * (8 + 4 * 12)


def test_a_tenant_that_leaves_and_comes_back_keeps_its_debt():
    shares = FairShare(round_len=1000)
    busy, greedy = shares.join("busy", 2), shares.join("greedy", 1)
    shares.line_up(greedy)
    shares.note_admitted(greedy, 500)
    busy.waiting.add(plain_request(1, busy))
    shares.line_up(busy)
    busy.served = 100
    greedy.served = 500
    shares.leave(greedy)
    again = shares.join("greedy", 1)
    shares.line_up(again)
    assert again.served == 500
    busy.served = 900
    shares.leave(again)
    assert shares.join("greedy", 1) is not again, "paid off: forgotten, and level with the rest"


def plain_request(arrival, account, *, priority=0, turn=0, num_tokens=3):
    return Request(
        request_id=str(arrival),
        sample_index=0,
        arrival=arrival,
        token_ids=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(),
        seed=0,
        kv=CompressionConfig().resolve(None, num_tokens),
        end_len=9,
        needs_queries=False,
        query_line=0,
        priority=priority,
        turn=turn,
        account=account,
    )


def naive_order(requests, order, max_skips, cached):
    """What one queue without tenants would say."""
    front = sorted(requests, key=lambda r: (r.priority, r.turn, r.arrival))[:LOOKAHEAD]
    if order == "fcfs":
        return front
    late = [r.skips >= max_skips for r in front]
    keys = [
        (r.priority, 0, 0, r.turn, r.arrival)
        if is_late
        else (r.priority, 1, -cached(r), r.turn, r.arrival)
        for r, is_late in zip(front, late, strict=True)
    ]
    return [r for _, r in sorted(zip(keys, front, strict=True), key=lambda pair: pair[0])]


@settings(max_examples=150, deadline=None)
@given(
    order=st.sampled_from(["fcfs", "lpm"]),
    acts=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 1), st.integers(0, 2)), max_size=90),
)
def test_one_tenant_alone_is_served_exactly_as_by_one_queue(order, acts):
    shares = FairShare(round_len=10)
    queue = WaitingQueue(order, 2, shares)
    account = shares.join("", 1000)
    known, cached = [], lambda request: request.arrival * 7 % 5
    for arrival, (act, priority, turn) in enumerate(acts):
        expected = naive_order(known, order, 2, cached)
        assert queue.in_order(cached) == expected
        assert queue.first() is (min(known, key=lambda r: r.own_precedence) if known else None)
        if act < 2 or not known:
            request = plain_request(arrival, account, priority=priority, turn=turn)
            queue.add(request)
            known.append(request)
        elif act == 2:
            admitted = expected[turn % len(expected)]
            queue.remove(admitted)
            known.remove(admitted)
            shares.note_admitted(account, admitted.num_uncharged)
            queue.note_admitted(admitted)
        else:
            queue.end_turn(expected[0])
    assert len(queue) == len(known)


@settings(max_examples=100, deadline=None)
@given(
    served=st.lists(st.integers(0, 30), min_size=2, max_size=6),
    counts=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    lens=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_the_front_is_whom_letting_in_one_by_one_would_choose(served, counts, lens):
    shares = FairShare(round_len=10)
    queue = WaitingQueue("fcfs", 2, shares)
    accounts = [shares.join(str(number), 50) for number in range(len(served))]
    for number, account in enumerate(accounts):
        for index in range(counts[number]):
            queue.add(plain_request(index, account, num_tokens=lens[number]))
    for number, account in enumerate(accounts):
        shares.note_admitted(account, served[number])
    front = queue.in_order(len)
    virtual = [[s, number + 1, number] for number, s in enumerate(served)]
    left = list(counts)
    for place, request in enumerate(front):
        standing = min(v for v in virtual if left[v[2]])
        assert request.account is accounts[standing[2]]
        standing[0] += lens[standing[2]]
        standing[1] = 100 + place
        left[standing[2]] -= 1
    assert len(front) == min(LOOKAHEAD, sum(counts[: len(served)]))
    assert queue.in_order(len) == front, "looking changed something"


@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize(("num_ahead", "compaction_delay"), [(0, 0), (1, 3), (1, -1)])
def test_the_scheduler_keeps_its_laws_with_several_tenants_under_pressure(
    batch, num_ahead, compaction_delay
):
    """Rounds as short as a few tokens, so that precedence between tenants changes all the time."""
    for seed in range(40 * batch, 40 * batch + 40):
        load = random_load(seed, num_ahead, compaction_delay)
        config = dataclasses.replace(load.world.scheduler, turn_len=3 + seed % 3)
        world = dataclasses.replace(load.world, scheduler=config)
        simulation = TenantsByName(world, "xyz")
        simulation.play(load.events, max_steps=5000)
        simulation.check_all_ended()
        simulation.check_outputs()
        simulation.check_no_starvation()
        simulation.check_all_home()
        assert simulation.scheduler._state.shares.num_live == 0, f"seed {seed}"


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_a_long_request_goes_on_beside_anothers_flood_in_a_small_pool(num_host_blocks):
    """By turns alone each short request, new as it is, would take the long one's place."""
    world = make_world(num_blocks=14, num_host_blocks=num_host_blocks, max_model_len=64)
    config = dataclasses.replace(world.scheduler, turn_len=4, growth_reserve=4)
    simulation = TenantSimulation(dataclasses.replace(world, scheduler=config))
    simulation.add(tenant_request("long", 0, prompt_len=4, max_tokens=40))
    flood(simulation, "flood", 200, prompt_len=8, max_tokens=8)
    run_while(simulation, lambda: "long-0" not in simulation.order_ended)
    assert len(simulation.order_ended) < 100, "it waited for most of the flood"
    simulation.run_until_idle(5000)
    simulation.check_all_ended()


def test_tenants_that_have_gone_are_forgotten():
    simulation = TenantSimulation(make_world())
    shares = simulation.scheduler._state.shares
    most = 0
    for index in range(600):
        simulation.add(tenant_request(f"t{index}", 0, max_tokens=2))
        simulation.add(tenant_request("always", index, max_tokens=2))
        simulation.step()
        most = max(most, shares.num_tenants)
        if index % 100 == 0:
            while len(simulation.scheduler._state.waiting) > 5:
                simulation.step()
    simulation.run_until_idle(3000)
    assert shares.num_tenants == 0
    assert most < 400, f"{most} tenants were remembered at once"


def test_one_tenant_may_be_bounded_while_others_still_come_in():
    world = make_world(max_running=1)
    config = dataclasses.replace(world.scheduler, max_waiting=10, max_waiting_per_tenant=3)
    simulation = TenantSimulation(dataclasses.replace(world, scheduler=config))
    flood(simulation, "a", 5)
    assert list(simulation.refused) == ["a-3", "a-4"]
    assert "max_waiting_per_tenant=3" in simulation.refused["a-3"]
    flood(simulation, "b", 2)
    simulation.add(tenant_request("c", 0, n=3))
    simulation.add(tenant_request("d", 0, n=2))
    assert "d-0" not in simulation.refused
    simulation.add(tenant_request("e", 0))
    assert "10 requests wait already (max_waiting=10)" in simulation.refused["e-0"]
    simulation.run_until_idle(500)
    simulation.add(tenant_request("a", 9))
    assert "a-9" not in simulation.refused
