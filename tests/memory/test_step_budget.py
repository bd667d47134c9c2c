"""Steps become smaller when memory was refused, and grow back."""

from zipage_lang.runtime.step_budget import STEPS_TO_DOUBLE, StepBudget


def test_a_budget_starts_at_its_bound_and_never_passes_it():
    budget = StepBudget(100)
    budget.grow()
    assert budget.num_tokens == 100


def test_a_refusal_halves_what_the_step_had_used():
    budget = StepBudget(100)
    budget.halve(40)
    assert budget.num_tokens == 20
    budget.halve(60)
    assert budget.num_tokens == 10


def test_it_never_falls_below_one_token():
    budget = StepBudget(4)
    for _ in range(9):
        budget.halve(0)
    assert budget.num_tokens == 1


def test_it_grows_back_to_its_bound_in_steps_that_went_well():
    budget = StepBudget(64)
    budget.halve(64)
    for _ in range(STEPS_TO_DOUBLE - 1):
        budget.grow()
        assert budget.num_tokens < 64
    budget.grow()
    budget.grow()
    assert budget.num_tokens == 64
