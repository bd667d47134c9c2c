"""A few thousand steps of the machine, in seconds: planted faults (tests/mutations) must fail here.

A failure is printed as it was found: nothing is shrunk, which the long runs beside this do.
"""

import hypothesis
import pytest
from test_support.engine_world import EngineWorld
from test_support.scheduler_machine import play_machine
from test_support.tensor_world import TensorWorld


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize(
    ("world_type", "num_steps"), [(EngineWorld, 2_000), (TensorWorld, 800)], ids=["hash", "tensors"]
)
def test_laws_hold_for_a_while(world_type, num_steps, num_ahead):
    phases = [hypothesis.Phase.generate]
    played = play_machine(num_ahead, 77, num_steps, world_type, phases=phases, max_examples=5)
    assert played.num_steps >= num_steps
    assert played.totals["drew from a compacted state"] > 50
