"""Samples that wait with what their leader computes in the same step: nobody may build on it yet.

A step's plan is made before anybody knows whether there is memory for all of it.
Knows nothing of real memory.
"""

import pytest
from test_support.scarce_memory import ERROR, ScarceSimulation
from test_support.simulation import World

from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.sampling_params import SamplingParams

PROMPT = [1, 1, 2, 2, 1, 2, 1, 2]


def request(name, token_ids, priority=0, hold=False, **sampling):
    return AddRequest(
        request_id=name,
        token_ids=token_ids,
        priority=priority,
        hold=hold,
        sampling=SamplingParams(seed=len(name), ignore_eos=True, **sampling),
    )


def scarce(**fields):
    """A simulation in which nothing fails until `fail` says so."""
    fields = {"num_blocks": 8, "block_size": 2, "num_host_blocks": 0} | fields
    return ScarceSimulation(World(**fields), seed=1, share=0.0)


def fail(simulation, doomed):
    """Let the chunks of the next step fail whose (request, sample) are named, and their copies."""
    pick = simulation.runner._pick

    def pick_doomed(plan):
        losses, builder = pick(plan), simulation.scheduler._in_flight[plan.step]
        for planned in builder.chunks:
            if (planned.request.request_id, planned.request.sample_index) in doomed:
                losses.rows |= {planned.chunk.row, *planned.chunk.sample_rows}
                own = set(planned.request.table.block_ids)
                losses.block_ids |= own & {copy.dst for copy in plan.block_copies}
        return losses

    simulation.runner._pick = pick_doomed
    plan = simulation.step()
    simulation.runner._pick = pick
    return plan


def play_out(simulation):
    simulation.run_until_idle(200)
    simulation.check_all_ended()
    simulation.check_outputs()
    simulation.check_all_home()


def test_what_a_failed_prefill_was_to_compute_is_not_found_later():
    """Somebody behind the leader finds no block in the very step that ends the leader's prompt.
    The waiting sample is not asked for its blocks: they would be in the tree, and are empty."""
    scheduler = SchedulerConfig(max_running=2, max_chunk_len=4, max_step_tokens=8, growth_reserve=0)
    simulation = scarce(scheduler=scheduler)
    simulation.add(request("other", [2, 1, 2, 2, 1, 2, 1, 2, 2, 1], max_tokens=1))
    simulation.step()
    simulation.add(request("leader", PROMPT, priority=-1, max_tokens=4, n=2))
    simulation.step()
    plan = fail(simulation, {("leader", 0)})
    assert [chunk.sample_rows for chunk in plan.chunks] == [(1,)]  # the other one found no block
    simulation.add(request("again", [*PROMPT, 1], max_tokens=4))
    play_out(simulation)
    assert simulation.failed == {("leader", 0), ("leader", 1)}


def test_a_waiting_sample_outlives_a_sibling_that_is_computed_again():
    """It has the prompt from before: that a second prefill fails is not its business."""
    for prefix_caching in (True, False):
        simulation = scarce(
            num_blocks=40,
            prefix_caching=prefix_caching,
            scheduler=SchedulerConfig(max_running=2),
        )
        simulation.add(request("r", PROMPT, max_tokens=9, n=3))
        simulation.step()
        scheduler = simulation.scheduler
        displaced = scheduler._by_id["r"][1]
        scheduler._pressure.preempt(displaced, PlanBuilder())
        assert [sample.logical_len for sample in scheduler._state.waiting] == [0, 7]
        fail(simulation, {("r", 1)})
        assert simulation.final("r", 1).error == ERROR
        play_out(simulation)
        assert simulation.failed == {("r", 1)}


@pytest.mark.parametrize("who_copies", ["leader", "parent"])
def test_a_copy_that_was_not_made_is_nobodys_prompt(who_copies):
    """A forked leader that writes first has a copy of the block it shares. A sample that waits has
    that copy too, and of the leader's chunk nothing; without one it has what was there before."""
    num_tokens, is_held = (1, True) if who_copies == "leader" else (9, False)
    simulation = scarce(
        num_blocks=20,
        block_size=4,
        scheduler=SchedulerConfig(max_running=1 if is_held else 2),
    )
    simulation.add(request("parent", PROMPT[:6], max_tokens=num_tokens, hold=is_held))
    simulation.step()
    simulation.fork("parent", [request("child", [*PROMPT[:6], 1], max_tokens=4, n=2)])
    plan = fail(simulation, {("child", 0)})
    assert len(plan.block_copies) == 1
    assert {chunk.num_tokens for chunk in plan.chunks} == {1}
    play_out(simulation)
    assert simulation.failed == {("child", 0), *([("child", 1)] if is_held else [])}
