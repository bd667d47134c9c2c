"""What a soak calls growth, on made-up processes and tables; and a short soak of a real server."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MINUTES = 30


@pytest.fixture(scope="module")
def load():
    """A file of benchmarks/ by its name; they import each other as scripts do."""
    sys.path.insert(0, str(BENCHMARKS))

    def load_file(name):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load_file
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def watch_of(load):
    """A watch over MINUTES, of functions of the minute."""

    def make(rss=lambda _: 100.0, fds=lambda _: 10, entries=lambda _: 5):
        soak_watch, now = load("soak_watch"), [0.0]

        def process():
            return types.SimpleNamespace(
                oneshot=lambda: types.SimpleNamespace(
                    __enter__=lambda *_: None, __exit__=lambda *_: None
                ),
                memory_info=lambda: types.SimpleNamespace(rss=rss(now[0] / 60) * 2**20),
                num_threads=lambda: 3,
                num_fds=lambda: fds(now[0] / 60),
            )

        soak_watch.ProcessUse.of = classmethod(
            lambda cls, one: cls(one.memory_info().rss / 2**20, one.num_threads(), one.num_fds())
        )
        watch = soak_watch.Watch(
            {"engine": process()}, lambda: {"records": entries(now[0] / 60)}, lambda: now[0]
        )
        for minute in range(MINUTES + 1):
            now[0] = 60.0 * minute
            watch.take()
        return watch

    return make


def test_flat_memory_and_tables_that_follow_the_load_are_no_growth(watch_of):
    watch = watch_of(rss=lambda m: 100 + 3 * (m % 2), entries=lambda m: int(m * 7) % 12)
    assert watch.growing() == []
    assert watch.report()["processes"]["engine"]["rss_mib_highest"] == 103.0


def test_a_warm_up_is_no_growth(watch_of):
    assert watch_of(rss=lambda m: 100 + 20 * min(m, 9)).growing() == []


def test_slow_growth_of_memory_is_seen(watch_of):
    assert watch_of(rss=lambda m: 100 + 0.7 * m).growing() == [
        "engine: memory grows by 0.70 MiB a minute"
    ]


def test_a_table_that_is_never_cleaned_is_seen(watch_of):
    assert watch_of(entries=lambda m: int(10 * m)).growing() == ["table records grows"]


def test_files_left_open_are_seen(watch_of):
    assert watch_of(fds=lambda m: 10 + int(5 * m)).growing() == ["engine: num_fds grows"]


def test_too_few_samples_say_nothing(watch_of):
    watch = watch_of()
    del watch.samples[3:]
    with pytest.raises(AssertionError, match="too few"):
        watch.growing()


@pytest.mark.slow
def test_half_a_minute_through_a_real_server_loses_nothing_and_says_nothing_wrong(load):
    """Too short to see growth; that is what the half hour is for."""
    soak = load("soak")
    result = soak.soak(soak.parse_arguments(["--minutes=0.5", "--clients=8"]))
    wrong = [fault for fault in result["faults"] if "grows" not in fault and "never" not in fault]
    assert not wrong
    assert result["num_lost"] == result["num_wrong"] == 0
    assert result["num_probes"] > 0
    assert result["num_ended"] > 0
