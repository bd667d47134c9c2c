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
    """The modules `loads` and `limits`, which import each other as scripts do."""
    modules = []
    for name in ("loads", "limits"):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules.append(module)
    yield modules
    for name in ("loads", "limits"):
        del sys.modules[name]


def test_loads_are_the_published_ones(benchmarks):
    loads, _ = benchmarks
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
    _, limits = benchmarks
    for seed in range(20):
        rng = random.Random(seed)
        load = [([1] * rng.randint(8, 30), rng.randint(20, 200)) for _ in range(20)]
        machine = limits.Machine(rng.choice([400, 1000, 10_000]), 1e3, rng.choice([1, 50]), 1e3)
        played = seconds_in_order(load, machine, budget, 16, limits.SHARERS)
        least, num_tokens = limits.bound(load, machine, budget, 16)
        assert num_tokens == sum(num_output for _, num_output in load)
        assert least <= played * (1 + 1e-9)


def test_bound_is_met_when_everything_fits_at_once(benchmarks):
    _, limits = benchmarks
    load = [([1] * 8, 100)] * 4
    machine = limits.Machine(pool_tokens=1e6, weight_bytes=1e6, kv_bytes_per_token=1, bandwidth=1e3)
    played = seconds_in_order(load, machine, None, 16, limits.SHARERS)
    assert limits.bound(load, machine)[0] == pytest.approx(played)
