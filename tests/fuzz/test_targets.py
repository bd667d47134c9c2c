"""Each fuzzing target holds for all kept inputs and for some hundred fresh ones.

Kept inputs are those that reach code of their own, and those that once broke something. Long,
coverage-guided runs: `python tests/fuzz/run.py TARGET`. Knows nothing of what targets read.
"""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from test_support.fuzz_strategy import inputs

HERE = Path(__file__).resolve().parent
MAX_CORPUS_BYTES = 300_000
NUM_FRESH = 150


def load_runner():
    spec = importlib.util.spec_from_file_location("fuzz_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runner = load_runner()


@pytest.fixture(scope="module", params=runner.target_names())
def name(request):
    return request.param


@pytest.fixture(scope="module")
def target(name):
    return runner.load_target(name)


def test_every_kept_input_still_holds(name, target):
    kept = runner.corpus_of(name)
    assert kept, f"no corpus of {name}; python tests/fuzz/run.py {name}"
    for path in kept:
        target(path.read_bytes())


def test_fresh_inputs_near_the_kept_ones_hold(name, target):
    kept = [path.read_bytes() for path in runner.corpus_of(name)]

    @settings(
        max_examples=NUM_FRESH,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(kept))
    def holds(data):
        target(data)

    holds()


def test_the_corpora_are_small_and_each_belongs_to_a_target():
    folders = [path for path in (HERE / "corpus").iterdir() if path.is_dir()]
    assert {path.name for path in folders} <= set(runner.target_names())
    sizes = [path.stat().st_size for folder in folders for path in folder.iterdir()]
    assert sum(sizes) < MAX_CORPUS_BYTES
    assert max(sizes) <= runner.MAX_INPUT_BYTES


def test_an_input_that_breaks_a_target_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "CORPUS", tmp_path)

    def breaks_on_long_ones(data):
        assert len(data) < 3

    monkeypatch.setattr(runner, "load_target", lambda _: breaks_on_long_ones)
    with pytest.raises(AssertionError):
        runner.fuzz_by_hypothesis("anything", 30)
    (kept,) = (tmp_path / "anything").iterdir()
    assert len(kept.read_bytes()) == 3, "shrunk to the shortest"
