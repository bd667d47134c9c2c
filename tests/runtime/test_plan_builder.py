"""Rows that are set up in one step: what it costs, and what a row's earlier holder leaves."""

import types

from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.sampling_params import SamplingParams


class Newcomer:
    """A request that has just got a row; counts how often it is asked which."""

    num_asked = 0

    def __init__(self, row, block_ids=(1, 2)):
        self._row = row
        self.table = types.SimpleNamespace(block_ids=list(block_ids))
        self.token_ids, self.num_prompt_tokens = [1, 2, 3], 3
        self.sampling, self.seed = SamplingParams(), row

    @property
    def row(self):
        Newcomer.num_asked += 1
        return self._row


def cost_of_each(num_rows):
    plan, Newcomer.num_asked = PlanBuilder(), 0
    for row in range(num_rows):
        plan.set_up_row(Newcomer(row))
    assert [setup.row for setup in plan.seal(1).row_setups] == list(range(num_rows))
    return Newcomer.num_asked / num_rows


def test_a_row_costs_the_same_however_many_are_set_up_in_the_step():
    """Hundreds of samples may branch off one prompt at once."""
    assert cost_of_each(400) == cost_of_each(4)


def test_a_row_that_was_given_up_in_the_same_step_leaves_nothing():
    plan = PlanBuilder()
    for row, block_ids in ((0, (1, 2)), (1, (3,)), (0, (4, 5, 6))):
        plan.set_up_row(Newcomer(row, block_ids))
    sealed = plan.seal(1)
    assert sorted(setup.row for setup in sealed.row_setups) == [0, 1]
    assert sorted(update.block_ids for update in sealed.block_updates) == [(3,), (4, 5, 6)]
