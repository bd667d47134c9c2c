"""The fixed loads are those that others were measured on, and the bounds are bounds."""

import importlib.util
import pathlib
import random
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"
FINGERPRINTS = {"aime": "7f134adc07b1", "aime_long": "ff84a1d84e92", "short": "cb0025332744"}


@pytest.fixture(scope="module")
def benchmarks():
    """The modules `loads`, `limits` and `schedule`, which import each other as scripts do."""
    modules, names = [], ("loads", "limits", "schedule")
    for name in names:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules.append(module)
    yield modules
    for name in names:
        del sys.modules[name]


def test_loads_are_the_published_ones(benchmarks):
    loads, *_ = benchmarks
    assert {name: loads.fingerprint(make()) for name, make in loads.LOADS.items()} == FINGERPRINTS


def seconds_in_order(load, machine, budget, interval, sharers):
    """A load played with every token kept: first come, first served, all tokens counted."""
    waiting = [[len(prompt), num_output, 0] for prompt, num_output in load]
    running, seconds = [], 0.0

    def tail(done):
        if budget is None or done <= budget + interval:
            return done
        return budget + (done - budget - 1) % interval + 1

    while waiting or running:
        while waiting:
            longest = sum(p // sharers + tail(o) + interval for p, o, _ in [*running, waiting[0]])
            if running and longest > machine.pool_tokens:
                break
            running.append(waiting.pop(0))
        for request in running:
            request[2] += 1
        resident = sum(prompt + tail(done) for prompt, _, done in running)
        num_bytes = machine.weight_bytes + resident * machine.kv_bytes_per_token
        seconds += num_bytes / machine.bandwidth
        running = [request for request in running if request[2] < request[1]]
    return seconds


@pytest.mark.parametrize("budget", [None, 40])
def test_no_schedule_that_keeps_its_tokens_beats_the_bound(benchmarks, budget):
    _, limits, _ = benchmarks
    for seed in range(20):
        rng = random.Random(seed)
        load = [([1] * rng.randint(8, 30), rng.randint(20, 200)) for _ in range(20)]
        machine = limits.Machine(rng.choice([400, 1000, 10_000]), 1e3, rng.choice([1, 50]), 1e3)
        played = seconds_in_order(load, machine, budget, 16, limits.SHARERS)
        least, num_tokens = limits.bound(load, machine, budget, 16)
        assert num_tokens == sum(num_output for _, num_output in load)
        assert least <= played * (1 + 1e-9)


def test_bound_is_met_when_everything_fits_at_once(benchmarks):
    _, limits, _ = benchmarks
    load = [([1] * 8, 100)] * 4
    machine = limits.Machine(pool_tokens=1e6, weight_bytes=1e6, kv_bytes_per_token=1, bandwidth=1e3)
    played = seconds_in_order(load, machine, None, 16, limits.SHARERS)
    assert limits.bound(load, machine)[0] == pytest.approx(played)


@pytest.mark.parametrize("budget", [None, 64])
def test_a_played_load_draws_every_token_and_reads_no_less_than_the_bound(benchmarks, budget):
    """With too few blocks, so that requests lose their places."""
    _, limits, schedule = benchmarks
    rng = random.Random(5)
    load = [([index] * 40, rng.randint(100, 400)) for index in range(24)]
    words = ["--pool-gib", "0.2", "--swap-gib", "1", "--interval", "32", "--max-running", "24"]
    options = schedule.parse_arguments(words + (["--budget", str(budget)] if budget else []))
    played = schedule.play(schedule.make_scheduler(options), load, limits.Machine(0))
    assert played["num_tokens"] == sum(num_output for _, num_output in load)
    assert played["num_swap_ins"] == played["num_swap_outs"] > 0
    assert (played["num_compactions"] > 0) == (budget is not None)
    pool_tokens = options.pool_gib * 2**30 / limits.Machine(0).kv_bytes_per_token
    least, _ = limits.bound(load, limits.Machine(pool_tokens), budget, options.interval)
    assert played["read_s"] >= least
