"""A state that leaves and comes back in one step, of which the way out finds no memory."""

import pytest
from test_support.scarce_memory import ERROR

from zipage_lang.runtime.step_plan import BlockSwap, BlockUpdate, StepPlan

OUT = tuple(BlockSwap(block_id, host_id) for block_id, host_id in ((1, 0), (2, 1), (3, 2)))
BACK = tuple(BlockSwap(block_id, host_id) for block_id, host_id in ((7, 0), (8, 1), (9, 2)))


class PickySwap:
    """Has no memory for some host blocks; like the staged one it knows which it has written."""

    def __init__(self, lost):
        self.lost, self.written, self.read = lost, set(), []

    def swap_out(self, swaps):
        if self.lost.intersection(swap.host_id for swap in swaps):
            raise MemoryError(ERROR)
        self.written.update(swap.host_id for swap in swaps)

    def swap_in(self, swaps):
        for swap in swaps:
            if swap.host_id not in self.written:
                raise KeyError(swap.host_id)
            self.read.append(swap.host_id)


@pytest.mark.parametrize("lost", [set(), {0}, {1, 2}, {0, 1, 2}])
def test_what_did_not_get_to_the_host_does_not_come_back(make_engine, lost):
    runner = make_engine().runner
    runner._host_swap = swap = PickySwap(lost)
    tables = tuple(BlockUpdate(row, 0, (item.block_id,)) for row, item in enumerate(BACK))
    plan = StepPlan(step=1, swap_outs=OUT, swap_ins=BACK, block_updates=tables)
    trouble = runner.launch(plan).trouble
    assert swap.read == [host_id for host_id in (0, 1, 2) if host_id not in lost]
    assert (trouble is None) == (not lost)
    if trouble is not None:
        assert set(trouble.lost_host_ids) == lost
        assert set(trouble.failed_rows) == lost  # row i was to have host block i
