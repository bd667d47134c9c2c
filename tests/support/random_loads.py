"""Random worlds and random loads for the scheduler simulation; a seed determines each.

Knows nothing of the scheduler.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator

from test_support.simulation import Event, Simulation, World

from zipage_lang.runtime.config import CompressionConfig, SchedulerConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Load:
    """A world and what its clients do."""

    world: World
    events: list[Event]


def random_load(seed: int, num_ahead: int = 0, compaction_delay: int = 0) -> Load:
    """The arguments determine everything."""
    rng = random.Random(seed)
    world = random_world(rng)
    events = list(random_events(rng, world))
    world = dataclasses.replace(world, num_ahead=num_ahead, compaction_delay=compaction_delay)
    return Load(world, events)


def displacing_load(seed: int) -> Load:
    """Where many lose their places, and host memory mostly has room for them."""
    rng = random.Random(seed)
    world = random_world(rng)
    block_size = rng.choice([1, 2, 2, 4])
    world = dataclasses.replace(
        world,
        num_host_blocks=rng.choice([8, 64]),
        num_blocks=max(3, rng.choice([12, 16, 20, 24, 32, 40]) // block_size),
        block_size=block_size,
        max_model_len=64,
        scheduler=dataclasses.replace(
            world.scheduler,
            max_running=rng.choice([2, 3, 4, 8]),
            max_step_tokens=rng.choice([2, 16]),
            growth_reserve=rng.choice([0, 0, 256]),
            turn_len=rng.choice([1, 3, 8]),
        ),
        compression=dataclasses.replace(
            world.compression,
            kv_mode=rng.choice(["fixed", "fixed", "adaptive", "off"]),
            policy=rng.choice(["random", "zipage"]),
            kv_budget=rng.choice([4, 6, 8]),
            evict_interval=rng.choice([1, 2, 4]),
        ),
        num_ahead=rng.choice([0, 1]),
        compaction_delay=rng.choice([-1, 0, 2]),
    )
    return Load(world, list(random_events(rng, world)))


def play(load: Load) -> Simulation:
    """The load to its end, with all laws checked."""
    simulation = Simulation(load.world)
    simulation.play(load.events, max_steps=5000)
    simulation.check_all_ended()
    simulation.check_outputs()
    simulation.check_no_starvation()
    simulation.check_all_home()
    return simulation


def random_world(rng: random.Random) -> World:
    block_size = rng.choice([1, 2, 4])
    num_slots = rng.choice([8, 12, 16, 24, 40, 80, 160])
    num_query_slots = rng.choice([1, 1, 2, 8])
    turn_len = random.Random(num_slots + num_query_slots).choice([1, 3, 8, 2048])
    return World(
        num_blocks=max(2, num_slots // block_size),
        block_size=block_size,
        num_host_blocks=rng.choice([0, 0, 2, 8, 64]),
        num_query_slots=num_query_slots,
        max_model_len=rng.choice([16, 64, 64]),
        vocab_size=rng.choice([2, 3, 50]),
        eos_token_ids=rng.choice([(), (0,), (0, 1)]),
        prefix_caching=rng.random() < 0.7,
        scheduler=SchedulerConfig(
            max_running=rng.choice([1, 2, 4, 8]),
            max_step_tokens=rng.choice([1, 2, 5, 16, 64]),
            max_chunk_len=rng.choice([None, None, 1, 3]),
            order=rng.choice(["fcfs", "lpm"]),
            max_skips=rng.choice([1, 3, 64]),
            turn_len=turn_len,
        ),
        compression=CompressionConfig(
            kv_mode=rng.choice(["off", "fixed", "adaptive"]),
            kv_budget=rng.choice([4, 6, 8]),
            evict_interval=rng.choice([1, 2, 4, 6]),
            policy=rng.choice(["zipage", "random"]),
            protect=rng.choice(["prompt", "prompt", "none"]),
            num_query_slots=num_query_slots,
        ),
    )


def random_events(rng: random.Random, world: World) -> Iterator[Event]:
    """A load: requests that share prefixes, then forks, stops, aborts and releases among them."""
    num_requests = rng.randint(1, 8)
    horizon = rng.choice([0, 10, 60])
    texts = [_random_tokens(rng, world, rng.randint(1, 14)) for _ in range(2)]
    names = [f"r{index}" for index in range(num_requests)]
    for index, name in enumerate(names):
        request = _random_request(rng, world, name, index, texts)
        yield Event(rng.randint(0, horizon), f"add {name}", _adder(request))
    for index in range(rng.choice([0, 0, 1, 3])):
        yield _random_fork(rng, world, names, index, horizon)
    for _ in range(rng.choice([0, 0, 2])):
        yield Event(rng.randint(1, horizon + 20), "stop", _stopper(rng.choice(names), rng.random()))
    for _ in range(rng.choice([0, 0, 2])):
        yield Event(rng.randint(0, horizon + 20), "abort", _aborter(rng.choice(names)))
    for _ in range(rng.choice([0, 1])):
        yield Event(rng.randint(0, horizon + 40), "release", _releaser(rng.choice(names)))


def _random_tokens(rng: random.Random, world: World, count: int) -> list[int]:
    return [rng.randrange(min(world.vocab_size, 3)) for _ in range(count)]


def _random_kv(rng: random.Random, prompt_len: int) -> KVParams | None:
    if rng.random() < 0.4:
        return None
    return KVParams(
        mode=rng.choice(["off", "fixed", "fixed", "adaptive", None]),
        budget=rng.choice([None, 4, 5, 7]),
        interval=rng.choice([None, 1, 3, 4]),
        policy=rng.choice([None, "random", "zipage"]),
        protect=rng.choice([None, "prompt", "none"]),
        protected_len=rng.choice([None, rng.randint(0, prompt_len)]),
        reuse=rng.choice([None, "exact", "compacted"]),
    )


def _random_sampling(rng: random.Random, seed: int) -> SamplingParams:
    max_tokens = rng.choice([1, 2, 5, 12, 20, 30])
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
        temperature=rng.choice([0.0, 1.0]),
        seed=seed,
        stop_token_ids=rng.choice([[], [], [1]]),
        ignore_eos=rng.random() < 0.5,
        n=rng.choice([1, 1, 1, 2, 3, 6]),
        logprobs=rng.choice([None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        prompt_logprobs_start=rng.choice([0, 0, 3]),
    )


def _random_request(
    rng: random.Random, world: World, name: str, seed: int, texts: list[list[int]]
) -> AddRequest:
    text = rng.choice(texts)
    prompt = text[: rng.randint(1, len(text))] if rng.random() < 0.5 else list(text)
    prompt += _random_tokens(rng, world, rng.choice([0, 0, 1, 5]))
    sampling = _random_sampling(rng, seed)
    return AddRequest(
        request_id=name,
        token_ids=prompt,
        sampling=sampling,
        kv=_random_kv(rng, len(prompt)),
        namespace=rng.choice(["", "", "", "other"]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        group_id=f"group of {name}",
        hold=sampling.n == 1 and rng.random() < 0.3,
    )


def _random_fork(
    rng: random.Random, world: World, names: list[str], index: int, horizon: int
) -> Event:
    parent = rng.choice(names)
    ids = [f"f{index}.{child}" for child in range(rng.choice([1, 2, 4]))]
    suffixes = [_random_tokens(rng, world, rng.choice([0, 1, 3])) for _ in ids]
    samplings = [_random_sampling(rng, 100 + 10 * index + n) for n in range(len(ids))]
    like_parent, hold = rng.random() < 0.7, rng.random() < 0.3
    other_kv = _random_kv(rng, 3)

    def act(simulation: Simulation) -> None:
        if (parent, 0) not in simulation.transcripts:
            return
        family = simulation.transcripts[parent, 0]
        known = [*family.request.token_ids, *family.counted]
        kv = inherited_kv(family.request) if like_parent else other_kv
        children = [
            AddRequest(
                request_id=child_id,
                token_ids=[*known, *suffix],
                sampling=sampling,
                kv=kv,
                namespace=family.request.namespace,
                hold=hold and sampling.n == 1,
            )
            for child_id, suffix, sampling in zip(ids, suffixes, samplings, strict=True)
        ]
        simulation.fork(parent, children)

    return Event(rng.randint(0, horizon + 30), f"fork {parent}", act)


def inherited_kv(parent: AddRequest) -> KVParams:
    """The parent's own settings, with its protection pinned to what it was."""
    kv = parent.kv or KVParams()
    if kv.protected_len is not None:
        return kv
    return dataclasses.replace(kv, protected_len=len(parent.token_ids))


def _adder(request: AddRequest) -> Callable[[Simulation], None]:
    return lambda simulation: simulation.add(request)


def _stopper(name: str, share: float) -> Callable[[Simulation], None]:
    def act(simulation: Simulation) -> None:
        transcript = simulation.transcripts.get((name, 0))
        if transcript is not None and transcript.token_ids:
            cut = 1 + int(share * (len(transcript.token_ids) - 1))
            simulation.stop(name, 0, cut)

    return act


def _aborter(name: str) -> Callable[[Simulation], None]:
    return lambda simulation: simulation.abort(name)


def _releaser(name: str) -> Callable[[Simulation], None]:
    return lambda simulation: simulation.release(name)
