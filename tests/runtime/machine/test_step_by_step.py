"""The scheduler under clients who do anything at any time: each step ends before the next begins.

Half of the 100,000 steps; the other half has a step in flight (test_with_a_step_in_flight.py).
"""

import pytest
from test_support.scheduler_machine import play_machine
from test_support.situations import MESSAGE_PLACES, missing_situations

NUM_STEPS = 50_000
# Where a message finds a request only while a step is under way.
ONLY_IN_FLIGHT = {
    "being drawn for",
    "on its way to host memory",
    "on its way back from host memory",
}


@pytest.fixture(scope="module")
def played():
    return play_machine(num_ahead=0, first_seed=1, num_steps=NUM_STEPS)


def test_laws_hold_after_every_message_and_every_step(played):
    assert played.num_steps >= NUM_STEPS


def test_every_situation_was_reached(played):
    """Laws that hold where nothing happens prove nothing."""
    messages = {
        verb: [place for place in places if place not in ONLY_IN_FLIGHT]
        for verb, places in MESSAGE_PLACES.items()
    }
    assert not missing_situations(played.totals, messages)
