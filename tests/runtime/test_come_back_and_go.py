"""Who has come back from host memory in a step, and may have to go in the same step.

A plan's swap-outs are carried out before its swap-ins, which come last: a state that is to come is
not there before the next plan.
"""

import pytest
from test_support.simulation import Simulation, World

from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.sampling_params import SamplingParams


@pytest.fixture(params=[True, False], ids=["cached", "not cached"])
def came_back(request):
    """A simulation, its request "b" that was swapped out and in again, and the step's plan."""
    world = World(
        num_host_blocks=16,
        prefix_caching=request.param,
        scheduler=SchedulerConfig(max_running=2),
    )
    simulation = Simulation(world)
    for name in "ab":
        sampling = SamplingParams(max_tokens=9, seed=ord(name), ignore_eos=True)
        prompt = [ord(name) % 2, 1, 1, 2, 2]
        simulation.add(AddRequest(request_id=name, token_ids=prompt, sampling=sampling))
    for _ in range(3):
        simulation.step()
    scheduler, leaving, coming = simulation.scheduler, PlanBuilder(), PlanBuilder()
    displaced = scheduler._by_id["b"][0]
    scheduler._pressure.displace(displaced, leaving)
    assert displaced.swapped is not None
    simulation.runner.run(leaving.seal(100))
    assert scheduler._admission.admit(displaced, coming, is_alone=False)
    assert coming.seal(0).swap_ins
    return simulation, displaced, coming


def end(simulation, plan):
    """Carry the plan out, then everyone to the end."""
    simulation.runner.run(plan.seal(101))
    simulation.scheduler._state.host.free(plan.host_ids_read)
    simulation.scheduler.check_invariants()
    simulation.run_until_idle(200)
    simulation.check_all_ended()
    simulation.check_outputs()
    simulation.check_all_home()


def test_nobody_who_came_in_this_step_gives_way(came_back):
    simulation, newcomer, plan = came_back
    first = simulation.scheduler._by_id["a"][0]
    pick_victim = simulation.scheduler._pressure._pick_victim
    assert pick_victim(first, plan) is None
    assert pick_victim(first, PlanBuilder()) is newcomer  # a step later it may have to
    end(simulation, plan)


def test_who_comes_back_computes_from_the_next_step_on(came_back):
    """Its blocks' way over the bus lies beside the step in which they come."""
    simulation, newcomer, plan = came_back
    simulation.runner.run(plan.seal(101))
    simulation.scheduler._state.host.free(plan.host_ids_read)
    following = simulation.step()
    assert newcomer.row in [chunk.row for chunk in following.chunks]
    simulation.run_until_idle(200)


def test_who_came_back_computes_before_its_turn_may_end(came_back):
    """Else two whose orders disagree (turns, and shares of tenants) come and go for ever."""
    simulation, newcomer, plan = came_back
    scheduler = simulation.scheduler
    first, leaving = scheduler._by_id["a"][0], PlanBuilder()
    scheduler._pressure.displace(first, leaving)
    simulation.runner.run(leaving.seal(102))
    simulation.runner.run(plan.seal(101))
    scheduler._state.host.free(plan.host_ids_read)
    scheduler._state.end_turn(newcomer)
    newcomer.came_back_len = newcomer.logical_len
    scheduler._take_turns(PlanBuilder())
    assert newcomer.swapped is None
    newcomer.came_back_len -= 1  # as if it had computed a token
    leaving = PlanBuilder()
    scheduler._take_turns(leaving)
    assert newcomer.swapped is not None
    simulation.runner.run(leaving.seal(103))
    simulation.run_until_idle(200)
    simulation.check_outputs()


def test_what_is_all_in_the_tree_need_not_come_back_and_goes_on_at_once():
    """Samples of a prompt of whole blocks, displaced behind its prefill: with nothing to bring back
    a step that did nothing else would be none."""
    for order in ("fcfs", "lpm"):
        scheduler = SchedulerConfig(max_running=2, order=order)
        simulation = Simulation(World(num_blocks=8, num_host_blocks=64, scheduler=scheduler))
        sampling = SamplingParams(max_tokens=3, seed=1, n=2, ignore_eos=True)
        prompt = list(range(1, 13))
        simulation.add(AddRequest(request_id="a", token_ids=prompt, sampling=sampling))
        simulation.step()
        leaving = PlanBuilder()
        for sample in list(simulation.scheduler._by_id["a"]):
            simulation.scheduler._pressure.displace(sample, leaving)
        simulation.runner.run(leaving.seal(100))
        simulation.run_until_idle(200)
        simulation.check_outputs()
        assert simulation.scheduler.stats()["num_preemptions"] == 0


def test_what_comes_back_in_a_step_is_not_compacted_in_it():
    """Not even to make room: its tail is not there yet."""
    kv = KVParams(mode="fixed", budget=4, interval=4, policy="random")
    simulation = Simulation(World(num_blocks=40, num_host_blocks=40))
    sampling = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    simulation.add(AddRequest(request_id="a", token_ids=[1, 2, 3], sampling=sampling, kv=kv))
    scheduler, leaving, coming = simulation.scheduler, PlanBuilder(), PlanBuilder()
    (request,) = scheduler._by_id["a"]
    while not (request.table and scheduler._planner.can_compact_early(request)):
        simulation.step()
    scheduler._pressure.displace(request, leaving)
    simulation.runner.run(leaving.seal(100))
    assert scheduler._admission.admit(request, coming, is_alone=False)
    assert coming.is_coming_back(request)
    assert scheduler._planner.can_compact_early(request)
    assert not scheduler._pressure._compact_first([request], coming)
    simulation.runner.run(coming.seal(101))
    scheduler._state.host.free(coming.host_ids_read)
    assert scheduler._pressure._compact_first([request], PlanBuilder())


def test_a_step_only_brings_back_who_has_the_engine_for_itself():
    world = World(num_host_blocks=16, scheduler=SchedulerConfig(max_running=2))
    simulation = Simulation(world)
    sampling = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    simulation.add(AddRequest(request_id="a", token_ids=[1, 2, 3], sampling=sampling))
    for _ in range(3):
        simulation.step()
    leaving = PlanBuilder()
    simulation.scheduler._pressure.displace(simulation.scheduler._by_id["a"][0], leaving)
    simulation.runner.run(leaving.seal(100))
    back = simulation.step()
    assert back.swap_ins
    assert not back.chunks
    assert not back.is_idle
    assert simulation.step().chunks
    simulation.run_until_idle(200)
    simulation.check_outputs()
