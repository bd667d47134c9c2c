"""The scheduler under clients who do anything at any time: a step is in flight when they do it.

Results come a step late, compactions end with an earlier result than their own step's, or long
after it. Half of the 100,000 steps; the other half is in test_step_by_step.py.
"""

import pytest
from test_support.scheduler_machine import play_machine
from test_support.situations import missing_acts

NUM_STEPS = 50_000


@pytest.fixture(scope="module")
def played():
    return play_machine(num_ahead=1, first_seed=1000, num_steps=NUM_STEPS)


def test_laws_hold_after_every_message_and_every_step(played):
    assert played.num_steps >= NUM_STEPS


def test_every_act_was_reached(played):
    assert not missing_acts(played.totals)
