"""The same machine over the real cache, kernels, policies and swaps of the CPU.

What each draw has read, per layer and head, is held against the request's own tokens and the
recorded survivors of its compactions (`test_support.tensor_world`).
"""

import pytest
from test_support.scheduler_machine import play_machine
from test_support.tensor_world import TensorWorld

NUM_STEPS = 2_500
# All that moves slots, or shares them.
ACTS = (
    "copies before an append",
    "copies before a compaction",
    "drew from a plain state",
    "drew from a compacted state",
    "several samples of one prefill",
    "went on from a plain prefix",
    "went on from a compacted node",
    "num_compactions",
    "num_early_compactions",
    "num_preemptions",
    "num_swap_outs",
    "num_swap_ins",
)


@pytest.fixture(scope="module")
def played():
    return play_machine(1, 3, NUM_STEPS, TensorWorld, max_examples=20)


def test_every_draw_reads_its_own_slots_and_no_others(played):
    assert played.num_steps >= NUM_STEPS


def test_every_act_was_reached(played):
    assert not [name for name in ACTS if played.totals[name] == 0]


@pytest.mark.slow
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_every_draw_reads_its_own_slots_over_many_more_steps(num_ahead):
    played = play_machine(num_ahead, 50_000, 25_000, world_type=TensorWorld)
    assert played.num_steps >= 25_000
