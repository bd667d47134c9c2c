"""The worst steps: within the options' bounds, runnable, and read off the meter one by one."""

import json

import pytest
import torch
from test_support.tiny_shape import TINY_SHAPE

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.memory_probe import Meter, explained_out_of_memory, measure_needs
from zipage_lang.runtime.policies.registry import load_policies
from zipage_lang.runtime.worst_case import (
    USUAL_COPIES,
    USUAL_SAMPLING,
    decodes,
    largest_compaction,
    largest_step,
    usual_steps,
    worst_case,
)

OPTIONS = {
    "max_running": 5,
    "max_step_tokens": 23,
    "kv_budget": 12,
    "evict_interval": 6,
    "kv_mode": "fixed",
    "num_query_slots": 3,
    "block_size": 4,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY_SHAPE))
    return folder


def make_engine(folder, **options):
    config = EngineConfig.from_options(
        model=str(folder), load_format="dummy", backend="cpu", num_threads=1, **OPTIONS | options
    )
    engine = Engine(config)
    return engine, worst_case(config, engine.limits, load_policies())


def scripted_meter(readings):
    remaining = iter(readings)
    return Meter(torch.device("cpu"), 1000, lambda: next(remaining))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_running": 40},  # more rows than tokens in a step
        {"max_running": 1},
        {"max_step_tokens": 500},  # more tokens than the rows' contexts hold
        {"kv_budget": 4096},  # a tail as long as the context
        {"kv_mode": "off"},
        {"block_size": 1},
    ],
)
def test_the_worst_steps_run_on_the_small_pool_and_use_what_the_options_allow(
    model_folder, options
):
    _, worst = make_engine(model_folder, **options)
    engine, worst = make_engine(model_folder, num_blocks=worst.num_blocks, **options)
    scheduler = engine.config.scheduler
    step = largest_step(worst)
    asked = min(scheduler.max_step_tokens, scheduler.max_running * (worst.max_model_len - 1))
    assert asked - worst.num_rows < step.num_tokens <= scheduler.max_step_tokens
    result = engine.runner.run(step)
    assert sorted(sample.row for sample in result.samples) == list(range(worst.num_rows))
    usual = [engine.runner.run(plan).samples for plan in usual_steps(worst)]
    drawn_rows = [[sample.row for sample in samples] for samples in usual]
    assert drawn_rows == [[0]] * (1 + len(USUAL_SAMPLING)) + [[]] * len(USUAL_COPIES)
    assert worst.chunk_len <= worst.prompt_len <= scheduler.max_step_tokens
    assert worst.compacted_by
    for policy in worst.compacted_by:
        compaction = largest_compaction(worst, policy)
        assert len(compaction.compactions) == worst.num_rows
        engine.runner.run(compaction)
    assert len(engine.runner.run(decodes(worst, worst.num_rows)).samples) == worst.num_rows


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("zipage", "zipage2")),
        ({"policy": "zipage"}, ("zipage",)),
        ({"policy": "rkv:mass_weight=0.5"}, ("zipage", "rkv:mass_weight=0.5")),
        ({"policy": "full"}, ("zipage",)),
        ({"kv_mode": "off"}, ("zipage",)),  # nothing is calibrated for the usual one
    ],
)
def test_the_policy_that_requests_get_has_its_kernels_before_the_first_of_them(
    model_folder, options, expected
):
    _, worst = make_engine(model_folder, **options)
    assert worst.compacted_by == expected


@pytest.mark.parametrize("need", ["needs_forecast", "needs_query_stats"])
def test_a_policy_that_nobody_calibrated_is_not_run_at_the_start(model_folder, need):
    class Greedy:
        name, num_queries, num_recent, num_sinks = "mine", 64, 0, 0

    setattr(Greedy, need, True)
    engine, _ = make_engine(model_folder, kv_mode="off")
    policies = {policy.name: policy for policy in (*load_policies().values(), Greedy())}
    worst = worst_case(engine.config, engine.limits, policies)
    assert worst.compacted_by == ("zipage",)
    assert worst.num_queries == policies["zipage"].num_queries


def test_each_part_is_what_the_meter_grew_by(model_folder):
    _, worst = make_engine(model_folder)
    engine, worst = make_engine(model_folder, num_blocks=worst.num_blocks)
    asked = []

    def make_runner(num_blocks):
        asked.append(num_blocks)
        return engine.runner, 40

    needs = measure_needs(
        make_runner,
        worst,
        scripted_meter([110, 160, 190, 200, 300, 320]),
        used_before=10,
        logits_row_bytes=2,
    )
    assert asked == [worst.num_blocks]
    assert (needs.total, needs.others, needs.weights) == (1000, 10, 100)
    assert (needs.fixed, needs.step, needs.compaction) == (10, 30, 10)
    rest = 1 + 2 + 4  # the buckets below 5
    assert needs.graphs == 100 + rest * 2 + 3 * (20 - 4 * 2)


@pytest.mark.parametrize("options", [{"cuda_graphs": False}, {"max_running": 1}])
def test_without_further_graphs_nothing_is_added_to_what_was_measured(model_folder, options):
    _, worst = make_engine(model_folder, **options)
    engine, worst = make_engine(model_folder, num_blocks=worst.num_blocks, **options)
    meter = scripted_meter([110, 160, 190, 200, 210, 210])
    needs = measure_needs(
        lambda _: (engine.runner, 0), worst, meter, used_before=10, logits_row_bytes=2
    )
    assert needs.graphs == 10


def test_out_of_memory_becomes_a_value_error_that_says_what_and_what_to_change():
    with (
        pytest.raises(
            ValueError, match=r"model 'x' did not fit this machine.*tried 9 GiB.*smaller"
        ),
        explained_out_of_memory("model 'x'", torch.device("cpu")),
    ):
        raise torch.OutOfMemoryError("tried 9 GiB")
