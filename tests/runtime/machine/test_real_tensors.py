"""The same machine over the real cache, kernels, policies and swaps of the CPU.

What each draw has read, per layer and head, is held against the request's own tokens and the
recorded survivors of its compactions (`test_support.tensor_world`).
"""

import pytest
from test_support.scheduler_machine import play_machine
from test_support.situations import missing_acts
from test_support.tensor_world import TensorWorld

NUM_STEPS = 5_000


@pytest.fixture(scope="module")
def played():
    return play_machine(num_ahead=1, first_seed=3, num_steps=NUM_STEPS, world_type=TensorWorld)


def test_every_draw_reads_its_own_slots_and_no_others(played):
    assert played.num_steps >= NUM_STEPS


def test_every_act_was_reached(played):
    assert not missing_acts(played.totals)


@pytest.mark.slow
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_every_draw_reads_its_own_slots_over_many_more_steps(num_ahead):
    played = play_machine(num_ahead, 50_000, 25_000, world_type=TensorWorld)
    assert played.num_steps >= 25_000
