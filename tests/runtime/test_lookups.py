"""What a request that waits asks of the tree: it counts once, and it waits for no more than it may
take."""

import pytest
from test_support.simulation import WINDOW, Simulation, World

from zipage_lang.runtime.config import CompressionConfig, SchedulerConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

PROMPT = [1, 2, 2, 1, 1, 2, 1, 2, 2, 2, 1, 1]


def add(simulation, name, token_ids, max_tokens):
    sampling = SamplingParams(max_tokens=max_tokens, seed=len(name), ignore_eos=True)
    simulation.add(AddRequest(request_id=name, token_ids=token_ids, sampling=sampling))


def looked_up(simulation):
    """Tokens asked for, tokens found, and hits of all nodes."""
    cache = simulation.scheduler._state.cache
    hits = sum(node.num_hits for node in cache._tree.nodes())
    return cache.num_tokens_asked, cache.num_tokens_hit, hits


@pytest.mark.parametrize("known", [PROMPT, [7, 7, 7]], ids=["found", "not found"])
def test_a_lookup_counts_when_somebody_goes_on_from_it(known):
    """However many steps a request waits for memory."""
    simulation = Simulation(World(num_blocks=20, scheduler=SchedulerConfig(growth_reserve=0)))
    add(simulation, "before", known, 1)
    simulation.run_until_idle(20)
    add(simulation, "large", [5] * 26, 3)
    simulation.step()
    add(simulation, "waits", [*PROMPT, 3, 3, 3, 3], 4)
    before = looked_up(simulation)
    num_waited = 0
    while simulation.scheduler.stats()["num_waiting"]:
        assert looked_up(simulation) == before
        simulation.step()
        num_waited += 1
    assert num_waited > 1
    num_found = len(PROMPT) if known is PROMPT else 0
    asked, found, _ = looked_up(simulation)
    assert (asked - before[0], found - before[1]) == (16, num_found)
    simulation.run_until_idle(100)
    simulation.check_outputs()


@pytest.mark.parametrize("mode", ["off", "fixed"])
def test_who_may_take_no_more_of_a_prefix_does_not_wait_for_it(mode):
    """The paper's mode bounds a prompt too: behind its bound it computes for itself."""
    compression = CompressionConfig(
        kv_mode=mode, kv_budget=6, evict_interval=4, policy="zipage", protect="none"
    )
    scheduler = SchedulerConfig(max_chunk_len=2)
    simulation = Simulation(World(compression=compression, scheduler=scheduler))
    add(simulation, "first", PROMPT, 2)
    add(simulation, "second", PROMPT, 2)
    most = 6 + 4 - WINDOW if mode == "fixed" else len(PROMPT) - 2
    begun_at = {}
    for step in range(12):
        for setup in simulation.step().row_setups:
            begun_at[setup.row] = step
    assert begun_at == {0: 0, 1: most // 2}
    simulation.run_until_idle(100)
    simulation.check_outputs()
