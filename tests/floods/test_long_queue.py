"""A queue of many thousands: everyone ends, a step costs the same, memory is in proportion.

Growth is counted in calls and bytes, never in seconds.
"""

import dataclasses

import msgspec
import pytest
from test_support.op_count import num_bytes, num_calls
from test_support.simulation import World
from test_support.tenants import tenant_request

from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.messages import Abort, Fork, Stop
from zipage_lang.runtime.request import RequestRefused

WORLD = World(
    num_blocks=512,
    block_size=4,
    prefix_caching=False,
    scheduler=SchedulerConfig(max_running=64, max_step_tokens=512, max_waiting=200_000),
)
TENANTS = ("", "a", "b", "c")


def make_scheduler(world=WORLD, **options):
    config = dataclasses.replace(world.scheduler, **options)
    return dataclasses.replace(world, scheduler=config).make_scheduler()


def queued(num_requests, num_tenants=1, **options):
    """A scheduler that runs as many as it can, and so many behind them."""
    scheduler = make_scheduler(**options)
    for index in range(64 + num_requests):
        tenant = TENANTS[index % num_tenants]
        scheduler.add(tenant_request(tenant, index, prompt_len=2, max_tokens=20))
    runner = WORLD.make_runner()
    for _ in range(2):
        step(scheduler, runner)
    return scheduler, runner


def step(scheduler, runner):
    plan = scheduler.schedule()
    scheduler.apply(plan, runner.run(plan))
    return scheduler.take_outputs()


def play_out(num_requests, num_tenants):
    """Requests of one token each, to their ends; how many ended, and in how many steps."""
    scheduler, runner = make_scheduler(), WORLD.make_runner()
    for index in range(num_requests):
        tenant = TENANTS[index % num_tenants]
        scheduler.add(tenant_request(tenant, index, prompt_len=2, max_tokens=1))
    ended, num_steps = [], 0
    while scheduler.has_work:
        ended += [output.request_id for output in step(scheduler, runner) if output.is_final]
        num_steps += 1
    scheduler.check_invariants()
    assert scheduler.stats()["num_finished"] == num_requests
    assert len(set(ended)) == len(ended) == num_requests
    return num_steps


@pytest.mark.parametrize("num_tenants", [1, 4])
def test_ten_thousand_queued_requests_all_end(num_tenants):
    assert play_out(10_000, num_tenants) <= 10_000 // 64 + 2


@pytest.mark.slow
@pytest.mark.parametrize("num_tenants", [1, 4])
def test_a_hundred_thousand_queued_requests_all_end(num_tenants):
    assert play_out(100_000, num_tenants) <= 100_000 // 64 + 2


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
@pytest.mark.parametrize("num_tenants", [1, 4])
def test_planning_a_step_costs_the_same_behind_a_hundred_and_ten_thousand(order, num_tenants):
    costs = []
    for num_waiting in (100, 10_000):
        scheduler, runner = queued(num_waiting, num_tenants, order=order)
        plans = []
        costs.append(num_calls(lambda s=scheduler, p=plans: p.append(s.schedule())))
        result = runner.run(plans[0])
        costs[-1] += num_calls(lambda s=scheduler, p=plans[0], r=result: s.apply(p, r))
    assert costs[1] <= 1.05 * costs[0], costs


@pytest.mark.parametrize("num_tenants", [1, 4])
def test_a_step_that_finds_no_memory_costs_the_same_however_many_wait(num_tenants):
    """Pressure looks for what may give way; that must not be a walk along the queue."""
    costs = []
    for num_waiting in (100, 5_000):
        scheduler, _ = queued(num_waiting, num_tenants, growth_reserve=1)
        pressure = scheduler._pressure
        request = scheduler._state.running[0]
        costs.append(num_calls(lambda p=pressure, r=request: p.release_waiting_branch(r)))
        costs[-1] += num_calls(scheduler._state.waiting.first_displaced)
    assert costs[1] <= costs[0] + 4, costs


def test_adding_and_aborting_one_costs_about_the_same_however_many_wait():
    costs = []
    for num_waiting in (100, 10_000):
        scheduler, _ = queued(num_waiting)
        message = tenant_request("", 999_999)
        cost = num_calls(lambda s=scheduler, m=message: s.add(m))
        cost += num_calls(lambda s=scheduler: s.abort(Abort(request_ids=["-999999"])))
        costs.append(cost)
    assert costs[1] <= costs[0] + 30, costs  # a few more comparisons, as log n has it


def test_aborting_all_in_one_message_costs_in_proportion():
    costs = []
    for num_waiting in (1_000, 10_000):
        scheduler, _ = queued(num_waiting)
        ids = [f"-{index}" for index in range(64 + num_waiting)]
        costs.append(num_calls(lambda s=scheduler, i=ids: s.abort(Abort(request_ids=i))))
        assert not scheduler.has_work
        assert len({output.request_id for output in scheduler.take_outputs()}) >= num_waiting
        scheduler.check_invariants()
    assert costs[1] <= 10 * 1.3 * costs[0], costs


def test_ten_thousand_stops_and_aborts_of_unknown_ids_cost_next_to_nothing():
    scheduler, _ = queued(1_000)

    def send(count):
        for index in range(count):
            stop = Stop(request_id=f"unknown-{index}", sample_index=0, num_output_tokens=1)
            scheduler.stop(stop)
            scheduler.abort(Abort(request_ids=[f"unknown-{index}"]))

    assert num_calls(lambda: send(10_000)) <= 10_000 * 40
    assert scheduler.take_outputs() is not None
    scheduler.check_invariants()


def test_memory_of_the_queue_is_in_proportion_to_it():
    def make(count):
        scheduler = make_scheduler()
        for index in range(count):
            scheduler.add(tenant_request(f"t{index % 7}", index))
        return scheduler

    small, large = num_bytes(lambda: make(500)), num_bytes(lambda: make(2_000))
    assert large <= 4.6 * small, (small, large)


def test_samples_that_wait_share_one_prompt():
    """n=128 of a long prompt is one prompt in memory, not 128."""

    def make(n):
        scheduler = make_scheduler(dataclasses.replace(WORLD, max_model_len=2000))
        scheduler.add(tenant_request("", 0, prompt_len=1500, n=n))
        return scheduler

    one, many = num_bytes(lambda: make(1)), num_bytes(lambda: make(128))
    assert many <= one + 127 * 2_500, (one, many)


def test_exactly_max_waiting_may_wait_and_the_next_is_refused():
    scheduler = make_scheduler(max_waiting=10)
    for index in range(10):
        scheduler.add(tenant_request("", index))
    with pytest.raises(RequestRefused, match=r"10 requests wait already \(max_waiting=10\)"):
        scheduler.add(tenant_request("", 10))
    scheduler.abort(Abort(request_ids=["-3"]))
    scheduler.add(tenant_request("", 11))
    with pytest.raises(RequestRefused, match="max_waiting"):
        scheduler.add(tenant_request("", 12))


def test_a_hundred_requests_of_128_samples_each_end_on_their_own_paths():
    scheduler, runner = make_scheduler(), WORLD.make_runner()
    for index in range(100):
        scheduler.add(tenant_request("", index, prompt_len=6, max_tokens=2, n=128))
    finals = {}
    while scheduler.has_work:
        for output in step(scheduler, runner):
            if output.is_final:
                finals[output.request_id, output.sample_index] = output
    assert len(finals) == 12_800
    assert {final.usage.completion_tokens for final in finals.values()} == {2}
    scheduler.check_invariants()


def test_thousands_of_forks_of_one_parent_share_its_blocks_and_all_end():
    world = dataclasses.replace(WORLD, prefix_caching=True)
    scheduler, runner = make_scheduler(world), WORLD.make_runner()
    parent = msgspec.structs.replace(tenant_request("", 0, prompt_len=40, max_tokens=4), hold=True)
    scheduler.add(parent)
    told = []
    while scheduler.has_work:
        told += step(scheduler, runner)
    known = parent.token_ids + [t for output in told for t in output.token_ids]
    children = [
        msgspec.structs.replace(tenant_request("", index, max_tokens=2), token_ids=[*known, 7])
        for index in range(1, 3_001)
    ]
    scheduler.fork(Fork(parent_id=parent.request_id, children=children))
    ended = []
    while scheduler.has_work:
        ended += [output for output in step(scheduler, runner) if output.is_final]
    assert len({output.request_id for output in ended}) == 3_000
    assert min(output.usage.cached_tokens for output in ended) >= 40
    scheduler.check_invariants()
