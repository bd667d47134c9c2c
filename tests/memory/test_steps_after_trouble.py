"""How large steps are after one that met trouble."""

import dataclasses

import msgspec
import pytest
from test_support.simulation import Simulation, World

from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import StepPlan, StepTrouble

PROMPT_LEN = 40


@pytest.mark.parametrize(("num_tokens", "most"), [(0, PROMPT_LEN), (16, 8)])
def test_a_refusal_makes_steps_smaller_where_their_tokens_may_have_been_too_many(num_tokens, most):
    """A swap or a compaction that finds no memory in a step without tokens says nothing of them."""
    scheduler = SchedulerConfig(max_step_tokens=64)
    simulation = Simulation(World(max_model_len=64, scheduler=scheduler))
    sampling = SamplingParams(max_tokens=1)
    simulation.add(AddRequest(request_id="r", token_ids=[1] * PROMPT_LEN, sampling=sampling))
    plan = simulation.scheduler.schedule()
    cut = [msgspec.structs.replace(chunk, num_tokens=num_tokens) for chunk in plan.chunks]
    told = StepPlan(step=plan.step, chunks=tuple(cut))
    simulation.scheduler.note_trouble(told, StepTrouble(plan.step, 1, (), (), "no memory"))
    simulation.scheduler.apply(plan, simulation.runner.run(plan))
    sampling = dataclasses.replace(sampling, seed=1)
    simulation.add(AddRequest(request_id="next", token_ids=[2] * PROMPT_LEN, sampling=sampling))
    assert simulation.scheduler.schedule().num_tokens == most
