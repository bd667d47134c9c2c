"""Who has come back from host memory in a step, and may have to go in the same step.

A plan's swap-outs are carried out before its swap-ins, which come last: a state that is to come is
not there before the next plan.
"""

import pytest
from test_support.simulation import Simulation, World

from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.request import Status
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


def test_who_must_go_at_once_leaves_its_blocks_alone(came_back):
    """They may be another's in the same step, and what was to come is not left in the tree."""
    simulation, newcomer, plan = came_back
    block_ids = {swap.block_id for swap in plan.seal(0).swap_ins}
    simulation.scheduler._pressure.preempt(newcomer, plan)
    assert newcomer.status is Status.WAITING
    assert not plan.seal(0).swap_ins
    holds = list(simulation.scheduler._state.cache._pool.holds())
    assert all(holds[block_id] == (0, 0) for block_id in block_ids)
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
    newcomer.came_back_at = scheduler._state.counts.num_steps
    scheduler._take_turns(PlanBuilder())
    assert newcomer.swapped is None
    scheduler._state.counts.num_steps += 1
    leaving = PlanBuilder()
    scheduler._take_turns(leaving)
    assert newcomer.swapped is not None
    simulation.runner.run(leaving.seal(103))
    simulation.run_until_idle(200)
    simulation.check_outputs()


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
