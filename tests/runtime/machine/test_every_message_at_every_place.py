"""Each message meets its request wherever a request can be, many times; all laws hold to the end.

The machine beside this does all at once and at random; here no point is left to chance: loads are
played until somebody is at the place, and then the message is sent.
"""

import dataclasses
import random

import pytest
from test_support.engine_world import EngineSettings, EngineWorld
from test_support.random_loads import inherited_kv, random_events, random_world
from test_support.situations import PLACES

from zipage_lang.runtime.config import CompressionConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

TIMES, TIMES_IF_SLOW = 4, 40  # that each message meets its request at each place
LOADS_FOR_ONE = 400  # more than it takes until it does
VERBS = ("abort", "abort group", "stop", "fork", "release")
LIVE_PLACES = [place for place in PLACES if place != "unknown"]


def make_world(rng, place):
    """A random world in which that place is not too rare."""
    world = random_world(rng)
    fields = {field.name: getattr(world, field.name) for field in dataclasses.fields(world)}
    fields |= {"num_ahead": rng.choice([0, 1]), "compaction_delay": rng.choice([-1, 0, 3])}
    if "way" in place:
        fields["num_ahead"] = 1
    if "host memory" in place:
        fields |= {"num_host_blocks": 64, "num_blocks": max(4, 32 // world.block_size)}
    if "compact" in place:
        compression = CompressionConfig(
            kv_mode="fixed",
            kv_budget=4,
            evict_interval=4,
            policy=rng.choice(["random", "zipage"]),
            protect="none",
        )
        fields |= {"compaction_delay": 4, "compression": compression, "prefix_caching": True}
    if "query slot" in place:
        compression = CompressionConfig(kv_mode="fixed", kv_budget=6, evict_interval=4)
        fields |= {"num_query_slots": 1, "compression": compression}
    return EngineWorld(EngineSettings(**fields, compacts_late=rng.random() < 0.5))


def send(world, verb, request_id, rng, name):
    request = world.transcripts[request_id, 0].request
    match verb:
        case "abort":
            world.send_abort(request_id)
        case "abort group":
            world.send_group_abort(request.group_id)
        case "release":
            world.send_release(request_id)
        case "stop":
            index = rng.randrange(request.sampling.n)
            num_said = len(world.transcripts[request_id, index].token_ids)
            world.send_stop((request_id, index), rng.randint(max(0, num_said - 4), num_said + 1))
        case "fork":
            known = [*request.token_ids, *world.output(request_id)]
            known = known[: max(1, len(known) - rng.choice([0, 0, 1, 3]))]
            world.send_fork(
                request_id, [branch(request, known, rng, f"{name}.{i}") for i in (0, 1)]
            )


def branch(parent, known, rng, name):
    sampling = SamplingParams(max_tokens=rng.choice([2, 9]), seed=rng.randrange(2**20))
    kv = rng.choice([inherited_kv(parent), inherited_kv(parent), None])
    tokens = [*known, *[rng.randrange(3) for _ in range(rng.choice([0, 1, 4]))]]
    return AddRequest(
        request_id=name, token_ids=tokens, sampling=sampling, kv=kv, namespace=parent.namespace
    )


def play_until_met(seed, verb, place):
    """How often the message met its request there in this load."""
    rng = random.Random(seed)
    world, num_met = make_world(rng, place), 0
    events = sorted(random_events(rng, world.world), key=lambda event: event.step)
    for turn in range(120):
        while events and events[0].step <= turn:
            world.act(events.pop(0))
        if world.has_work:
            world.step()
        if num_met < 3 and rng.random() < 0.5:
            there = [name for name in world.names() if place in world.places(name)]
            if there:
                send(world, verb, rng.choice(there), rng, f"late{num_met}")
                num_met += 1
    world.drain()
    return num_met


def play_until_met_often(verb, place, times):
    num_met = 0
    for load in range(LOADS_FOR_ONE * times):
        seed = f"{verb}/{place}/{load}"
        try:
            num_met += play_until_met(seed, verb, place)
        except Exception as error:
            raise AssertionError(f"play_until_met({seed!r}, ..): {error!r}") from error
        if num_met >= times:
            return
    raise AssertionError(f"{verb} met nobody {place} more than {num_met} times")


@pytest.mark.parametrize("place", LIVE_PLACES)
@pytest.mark.parametrize("verb", VERBS)
def test_laws_hold(verb, place):
    play_until_met_often(verb, place, TIMES)


@pytest.mark.slow
@pytest.mark.parametrize("place", LIVE_PLACES)
@pytest.mark.parametrize("verb", VERBS)
def test_laws_hold_many_more_times(verb, place):
    play_until_met_often(verb, place, TIMES_IF_SLOW)
