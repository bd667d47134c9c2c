"""The scheduler under clients who do anything at any time: each step ends before the next begins.

Half of the 100,000 steps; the other half has a step in flight (test_with_a_step_in_flight.py).
"""

import pytest
from test_support.scheduler_machine import play_machine
from test_support.situations import missing_acts

NUM_STEPS = 50_000


@pytest.fixture(scope="module")
def played():
    return play_machine(num_ahead=0, first_seed=1, num_steps=NUM_STEPS)


def test_laws_hold_after_every_message_and_every_step(played):
    assert played.num_steps >= NUM_STEPS


def test_every_act_was_reached(played):
    """Laws that hold where nothing happens prove nothing."""
    assert not missing_acts(played.totals)
