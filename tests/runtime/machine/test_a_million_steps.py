"""Ten times the steps of the default run, from seeds that no run has had before.

The header of a failure names the seed; the rules that lead to it are printed.
"""

import secrets

import pytest
from test_support.scheduler_machine import play_machine


@pytest.mark.slow
@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("part", range(5))
def test_laws_hold_from_fresh_seeds(num_ahead, part):
    seed = secrets.randbits(48)
    print(f"play_machine({num_ahead}, first_seed={seed}, num_steps=...)")
    assert play_machine(num_ahead, seed, 100_000).num_steps >= 100_000
