"""Rows that find no memory end with one error each, and nobody else notices.

Random loads, and a runner that leaves undone whatever failed: slots stay unwritten, so anybody who
reads them fails. Knows nothing of real memory.
"""

import pytest
from test_support.random_loads import random_load
from test_support.scarce_memory import ScarceSimulation
from test_support.simulation import World

from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

SHARES = [0.002, 0.02, 0.2]
LOADS_PER_BATCH = 40


def play(seed, share, num_ahead=0, compaction_delay=0):
    load = random_load(seed, num_ahead, compaction_delay)
    simulation = ScarceSimulation(load.world, seed, share)
    try:
        simulation.play(load.events, max_steps=20_000)
        simulation.check_all_ended()
        simulation.check_outputs()
        simulation.check_all_home()
        check_rows_and_slots_home(simulation)
    except Exception as error:
        call = f"play({seed}, {share}, {num_ahead}, {compaction_delay})"
        raise AssertionError(f"{call}: {error!r}") from error
    return simulation


def check_rows_and_slots_home(simulation):
    stats, world, state = (
        simulation.scheduler.stats(),
        simulation.world,
        simulation.scheduler._state,
    )
    assert stats["num_free_host_blocks"] == world.num_host_blocks
    assert stats["num_free_query_slots"] == world.num_query_slots
    assert state.num_free_rows == world.scheduler.max_running
    assert not state.parting
    assert not state.compacting
    assert stats["num_failed"] == len(simulation.failed)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("batch", range(3))
def test_failed_rows_end_once_and_nobody_reads_what_they_left(batch, share):
    played = [play(seed, share) for seed in range(batch * 100, batch * 100 + LOADS_PER_BATCH)]
    assert any(simulation.failed for simulation in played)
    assert sum(simulation.runner.num_failed_rows for simulation in played) > 0


@pytest.mark.parametrize("compaction_delay", [-1, 0, 3])
@pytest.mark.parametrize("share", SHARES)
def test_failed_rows_with_the_next_step_in_flight(share, compaction_delay):
    played = [play(seed, share, 1, compaction_delay) for seed in range(LOADS_PER_BATCH)]
    assert any(simulation.failed for simulation in played)


def crowded(seed):
    """Requests that do not fit together and keep all their tokens: somebody is always displaced."""
    world = World(num_blocks=24, num_host_blocks=64, scheduler=SchedulerConfig(turn_len=4))
    simulation = ScarceSimulation(world, seed, 0.01)
    for index in range(8):
        sampling = SamplingParams(max_tokens=30, seed=index, ignore_eos=True)
        prompt = [index + 1, *range(5)]
        request = AddRequest(request_id=f"r{index}", token_ids=prompt, sampling=sampling)
        simulation.add(request)
    return simulation


def test_lost_host_blocks_end_only_those_that_wait_there():
    played = [crowded(seed) for seed in range(20)]
    for simulation in played:
        simulation.run_until_idle(2000)
        simulation.check_all_ended()
        simulation.check_outputs()
        simulation.check_all_home()
        check_rows_and_slots_home(simulation)
    assert sum(simulation.runner.num_lost_hosts for simulation in played) > 0
    assert all(len(simulation.failed) < 8 for simulation in played)
