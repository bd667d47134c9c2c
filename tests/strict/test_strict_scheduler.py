"""Strict mode's scheduler on simulated memory: who runs beside a request changes no token of it.

The fake runner draws from the slots that a row really reads, so a compaction that comes a token
early, keeps another number of slots or starts from another's state shows in the tokens. Knows
nothing of tensors.
"""

import dataclasses
from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_support.random_loads import random_load
from test_support.simulation import Event, Simulation, World

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.request import RequestRefused
from zipage_lang.runtime.sampling_params import SamplingParams

Tokens = dict[tuple[str, int], list[int]]
ROOMY = 400  # slots: nobody is ever short of memory


class Recorder:
    """Stands in for a simulation, to learn what a load's clients send."""

    def __init__(self) -> None:
        self.requests: list[AddRequest] = []

    def add(self, request: AddRequest) -> None:
        self.requests.append(request)


def strict_load(seed: int, num_ahead: int) -> tuple[World, list[tuple[int, AddRequest]]]:
    """A random load's world and requests with their steps; `adaptive` becomes `fixed`."""
    load = random_load(seed, num_ahead=num_ahead, compaction_delay=num_ahead)
    timed = []
    for event in load.events:
        if event.name.startswith("add"):
            recorder = Recorder()
            event.act(recorder)
            timed.append((event.step, _without_adaptive(recorder.requests[0])))
    compression = load.world.compression
    if compression.kv_mode == "adaptive":
        compression = dataclasses.replace(compression, kv_mode="fixed")
    scheduler = dataclasses.replace(load.world.scheduler, growth_reserve=0)
    world = dataclasses.replace(
        load.world, deterministic=True, compression=compression, scheduler=scheduler
    )
    return world, timed


def _without_adaptive(request: AddRequest) -> AddRequest:
    kv = request.kv
    if kv is not None and kv.mode == "adaptive":
        return msgspec.structs.replace(request, kv=dataclasses.replace(kv, mode="fixed"))
    return request


def tokens_of(world: World, timed: list[tuple[int, AddRequest]]) -> tuple[Tokens, Counter[str]]:
    simulation = Simulation(world)
    events = [
        Event(step, f"add {request.request_id}", lambda sim, request=request: sim.add(request))
        for step, request in timed
    ]
    simulation.play(events, max_steps=5000)
    simulation.check_all_ended()
    outputs = {
        key: transcript.token_ids
        for key, transcript in simulation.transcripts.items()
        if key[0] not in simulation.refused
    }
    stats = {name: value for name, value in simulation.scheduler.stats().items() if value}
    return outputs, Counter({k: v for k, v in stats.items() if isinstance(v, int)})


def alone(world: World, request: AddRequest) -> Tokens:
    """In a world with room for all, nothing cached, prompts computed in one go."""
    scheduler = dataclasses.replace(
        world.scheduler, max_running=8, max_step_tokens=512, max_chunk_len=None
    )
    roomy = dataclasses.replace(
        world,
        num_blocks=ROOMY // world.block_size,
        num_query_slots=8,
        prefix_caching=False,
        scheduler=scheduler,
        num_ahead=0,
        compaction_delay=0,
    )
    return tokens_of(roomy, [(0, request)])[0]


def check_company(seed: int, num_ahead: int) -> Counter[str]:
    world, timed = strict_load(seed, num_ahead)
    together, stats = tokens_of(world, timed)
    for _, request in timed:
        expected = alone(world, request)
        for key, tokens in together.items():
            if key[0] == request.request_id:
                assert tokens == expected[key], f"{key}: {tokens}, alone {expected[key]}"
    return stats


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), num_ahead=st.integers(0, 1))
def test_company_changes_no_token(seed, num_ahead):
    check_company(seed, num_ahead)


def test_loads_meet_every_way_to_lose_a_place():
    """Else the test above would show nothing: some are compacted, swapped, preempted, shared."""
    stats = Counter()
    for seed in range(80):
        stats += check_company(seed, num_ahead=seed % 2)
    wanted = ("num_compactions", "num_swap_outs", "num_preemptions", "num_tokens_hit")
    assert all(stats[name] > 0 for name in wanted), {name: stats[name] for name in wanted}
    assert stats["num_early_compactions"] == 0
    assert stats["num_recomputed_tokens"] > 0


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), num_ahead=st.integers(0, 1))
def test_company_changes_no_token_in_many_loads(seed, num_ahead):
    check_company(seed, num_ahead)


def test_an_early_compaction_would_show():
    """The same loads without strict mode: some request reads other slots than it does alone."""
    seeds = iter(range(400))
    for seed in seeds:
        world, timed = strict_load(seed, 0)
        loose = dataclasses.replace(world, deterministic=False)
        together = tokens_of(loose, timed)[0]
        expected = {}
        for _, request in timed:
            expected |= alone(loose, request)
        if any(tokens != expected[key] for key, tokens in together.items()):
            return
    pytest.fail("no load of 400 shows a difference, so these tests could not find one")


def test_adaptive_requests_are_refused():
    request = AddRequest(
        request_id="r", token_ids=[1], sampling=SamplingParams(), kv=KVParams(mode="adaptive")
    )
    with pytest.raises(RequestRefused, match="deterministic"):
        World(deterministic=True).make_scheduler().add(request)
