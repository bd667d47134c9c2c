"""The scheduler's laws over random loads, hundreds of them, with a runner that checks every slot.

Laws: everyone ends with exactly one final output per sample; no step is empty while work waits;
step, chunk and row budgets are kept; resident memory stays bounded; every block comes home; outputs
of requests never compacted depend on their own tokens only; who can never fit is refused.
"""

import dataclasses
import re
import zlib

import pytest
from test_support.random_loads import Load, displacing_load, play, random_load
from test_support.simulation import Simulation, World

from zipage_lang.runtime.config import CompressionConfig, SchedulerConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.steady_decodes import SteadyDecodes

NUM_BATCHES = 10
LOADS_PER_BATCH = 60


def play_seeds(seeds, num_ahead=0, compaction_delay=0):
    for seed in seeds:
        try:
            play(random_load(seed, num_ahead, compaction_delay))
        except Exception as error:
            call = f"random_load({seed}, {num_ahead}, {compaction_delay})"
            raise AssertionError(f"{call}: {error!r}") from error


def request(name, tokens, max_tokens=8, **fields):
    seed = zlib.crc32(name.encode())
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return AddRequest(request_id=name, token_ids=list(tokens), sampling=sampling, **fields)


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_laws_hold_over_random_loads(batch):
    play_seeds(range(batch * LOADS_PER_BATCH, (batch + 1) * LOADS_PER_BATCH))


@pytest.mark.parametrize("compaction_delay", [-1, 0, 3])
@pytest.mark.parametrize("batch", range(3))
def test_laws_hold_when_steps_are_planned_ahead_and_compactions_end_late(batch, compaction_delay):
    play_seeds(range(batch * 50, (batch + 1) * 50), 1, compaction_delay)


@pytest.mark.parametrize(
    "seed",
    [
        2138,  # eviction left a request alone with its last block in the midst of an append
        2240,  # alone in adaptive mode, resumed too near the pool's size to gather queries
        2377,  # displaced and admitted again in one step
        3365,  # samples branched off a state that fills the pool
        30157,  # a sample was admitted in the very step that computes what it branches from
        42923,  # a borrower took the oldest request's query slot again and again
    ],
)
def test_loads_that_once_failed(seed):
    play_seeds([seed])


# At the end those where a step did nothing but bring back a state that the tree had all of.
@pytest.mark.parametrize(
    "seeds",
    [
        *(range(first, first + 40) for first in range(0, 200, 40)),
        (100223, 100255, 101821, 102791, 105068, 105998),
    ],
)
def test_laws_hold_where_many_lose_their_places(seeds):
    num_back = 0
    for seed in seeds:
        try:
            num_back += play(displacing_load(seed)).scheduler.stats()["num_swap_ins"]
        except Exception as error:
            raise AssertionError(f"displacing_load({seed}): {error!r}") from error
    assert num_back > 5


@pytest.mark.parametrize(("num_ahead", "compaction_delay"), [(0, 0), (1, 0), (1, 3), (1, -1)])
def test_steady_decodes_are_planned_as_the_general_path_would(
    num_ahead, compaction_delay, monkeypatch
):
    loads = [random_load(seed, num_ahead, compaction_delay) for seed in range(60)]
    plan_steady = SteadyDecodes.plan
    answers = []

    def watched(self, request, plan):
        answers.append(plan_steady(self, request, plan))
        return answers[-1]

    monkeypatch.setattr(SteadyDecodes, "plan", watched)
    simulations = [play(load) for load in loads]
    assert min(answers.count(True), answers.count(False)) > 500
    monkeypatch.setattr(SteadyDecodes, "plan", lambda self, request, plan: False)
    for seed, (simulation, load) in enumerate(zip(simulations, loads, strict=True)):
        general = play(load)
        assert simulation.plans == general.plans, f"seed {seed}"
        assert simulation.transcripts == general.transcripts, f"seed {seed}"
        assert simulation.scheduler.stats() == general.scheduler.stats(), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(40))
def test_laws_hold_over_many_more_random_loads(batch):
    play_seeds(range(100_000 + 1000 * batch, 100_000 + 1000 * (batch + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("compaction_delay", [0, 3])
@pytest.mark.parametrize("batch", range(10))
def test_laws_hold_over_many_more_loads_that_are_planned_ahead(batch, compaction_delay):
    play_seeds(range(200_000 + 1000 * batch, 200_000 + 1000 * (batch + 1)), 1, compaction_delay)


def test_random_loads_reach_every_act_of_the_scheduler():
    """A simulation that never swaps or preempts would prove nothing about it."""
    totals = {}
    for seed in range(150):
        simulation = play(random_load(seed))
        for name, value in simulation.scheduler.stats().items():
            totals[name] = totals.get(name, 0) + value
        totals["refused"] = totals.get("refused", 0) + len(simulation.refused)
    assert totals["refused"] > 0
    acts = ("preemptions", "swap_outs", "swap_ins", "turns_taken", "compactions")
    acts += ("early_compactions",)
    missing = [act for act in acts if totals[f"num_{act}"] == 0]
    assert not missing, f"never happened: {missing}; {totals}"


def test_output_does_not_depend_on_who_else_is_served():
    """Each exact request of a load, alone in a roomy engine, says the same."""
    num_compared = 0
    for seed in range(80):
        crowd = play(random_load(seed))
        for (name, index), transcript in crowd.transcripts.items():
            if index or not crowd.is_exact(transcript.request) or not transcript.token_ids:
                continue
            alone = Simulation(roomy(crowd.world))
            alone.add(transcript.request)
            alone.run_until_idle(max_steps=500)
            for sample in range(transcript.request.sampling.n):
                got = crowd.transcripts[name, sample].token_ids
                assert alone.output(name, sample)[: len(got)] == got, f"{seed}: {name}/{sample}"
                num_compared += 1
    assert num_compared > 60


def roomy(world):
    return dataclasses.replace(
        world, num_blocks=4000, num_query_slots=64, scheduler=SchedulerConfig()
    )


KV_KINDS = {
    "off": None,
    "fixed": KVParams(mode="fixed", budget=4, interval=4, policy="random"),
    "queries": KVParams(mode="fixed", budget=4, interval=4, policy="zipage"),
    "unprotected": KVParams(mode="fixed", budget=4, interval=4, policy="zipage", protect="none"),
    "adaptive": KVParams(mode="adaptive", budget=4, interval=4, policy="zipage"),
}


def smallest_pool(kind, block_size, prompt_len, num_tokens):
    """The smallest pool in which the scheduler takes such a request."""
    for num_blocks in range(1, 100):
        simulation = Simulation(World(num_blocks=num_blocks, block_size=block_size))
        simulation.add(request("probe", range(prompt_len), num_tokens, kv=KV_KINDS[kind]))
        if not simulation.refused:
            return num_blocks
    raise AssertionError("refused in every pool")


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("kind", KV_KINDS)
@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_everyone_finishes_in_the_smallest_pool_that_takes_them(kind, block_size, num_host_blocks):
    num_blocks = smallest_pool(kind, block_size, prompt_len=5, num_tokens=25)
    world = World(
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        num_query_slots=1,
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=8),
    )
    simulation = Simulation(world)
    for index in range(5):
        simulation.add(
            request(f"r{index}", [index % 2, 1, 2, 3, 4], 25, kv=KV_KINDS[kind], hold=index == 1)
        )
    simulation.run_until_idle(max_steps=1500)
    simulation.check_all_ended()
    simulation.check_outputs()
    simulation.check_all_home()
    assert all(len(simulation.output(f"r{index}")) == 25 for index in range(5))


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_smallest_pool_is_what_the_design_says(block_size):
    """Full KV needs its tokens; a compacted request protected + K + E, one block of overshoot while
    it gathers queries, and one to copy a shared, partly filled block."""
    full = smallest_pool("off", block_size, prompt_len=5, num_tokens=25)
    assert -(-29 // block_size) <= full <= -(-30 // block_size)
    bounded = smallest_pool("fixed", block_size, prompt_len=5, num_tokens=50)
    assert -(-(5 + 8) // block_size) <= bounded <= -(-(5 + 8) // block_size) + 2


def test_what_can_never_fit_is_refused_at_once_and_the_rest_go_on():
    simulation = Simulation(World(num_blocks=8, block_size=2, max_model_len=40))
    simulation.add(request("fits", [1, 2, 3], 10))
    simulation.step()
    simulation.add(request("too long for the pool", [1, 2, 3], 20))
    simulation.add(request("prompt past the context", range(40), 1))
    simulation.add(request("fits too", [4, 2, 3], 10))
    assert set(simulation.refused) == {"too long for the pool", "prompt past the context"}
    assert re.search(r"\b(8|16)\b", simulation.refused["too long for the pool"])
    assert "40" in simulation.refused["prompt past the context"]
    simulation.run_until_idle(max_steps=200)
    simulation.check_all_ended()
    simulation.check_outputs()
    simulation.check_all_home()


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": []},
        {"token_ids": [50]},
        {"token_ids": [-1]},
        {"kv": KVParams(mode="fixed", policy="no such policy")},
    ],
    ids=["empty prompt", "token past the vocabulary", "negative token", "unknown policy"],
)
def test_request_that_makes_no_sense_is_refused(broken):
    simulation = Simulation(World(vocab_size=50))
    fields = {"token_ids": [1], **broken}
    simulation.add(AddRequest(request_id="bad", sampling=SamplingParams(), **fields))
    assert set(simulation.refused) == {"bad"}
    assert not simulation.scheduler.has_work


def test_long_compacted_generation_stays_bounded():
    kv = KVParams(mode="fixed", budget=8, interval=4, policy="zipage")
    world = World(num_blocks=12, block_size=2, max_model_len=3000)
    simulation = Simulation(world)
    simulation.add(request("long", [1, 2, 3], 2000, kv=kv))
    simulation.run_until_idle(max_steps=4000)
    simulation.check_all_ended()
    simulation.check_all_home()
    final = simulation.final("long")
    assert final.kv.max_resident_len <= 3 + 8 + 4 + 2
    assert final.kv.logical_len - final.kv.dropped == final.kv.resident_len
    assert final.kv.compactions > 400


def test_compaction_default_of_the_engine_applies_to_plain_requests():
    compression = CompressionConfig(kv_mode="fixed", kv_budget=4, evict_interval=4, policy="random")
    load = Load(World(compression=compression, num_blocks=16), [])
    simulation = Simulation(load.world)
    simulation.add(request("plain", [1, 2, 3], 30))
    simulation.run_until_idle(max_steps=100)
    assert simulation.final("plain").kv.compactions > 0
