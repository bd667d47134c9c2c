"""The FakeRunner takes right plans and names what is wrong with others: else it proves nothing."""

import dataclasses

import pytest
from test_support.fake_runner import FakeRunner, draw_token

from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import (
    BlockCopy,
    BlockSwap,
    BlockUpdate,
    Chunk,
    Compaction,
    RowSetup,
    StepPlan,
)

SAMPLING = SamplingParams(max_tokens=8)
PROMPT = (1, 2, 3, 4, 5)


def setup(row=0, tokens=PROMPT, num_prompt_tokens=5, seed=9):
    return RowSetup(row, tokens, num_prompt_tokens, SAMPLING, seed)


def chunk(row=0, tokens=PROMPT, position=0, start=None, sample=(), query_slot=None):
    start = position if start is None else start
    num_tokens = 1 if tokens is None else len(tokens)
    return Chunk(row, num_tokens, tokens, position, start, sample, query_slot, None)


def compaction(**changes):
    plain = Compaction(
        ident=0,
        row=0,
        policy="zipage",
        protected_len=1,
        tail_len=4,
        num_keep=2,
        stateful_len=0,
        logical_len=5,
        query_slot=0,
        num_queries=2,
        seed=0,
        block_ids_before=(1, 2, 3),
        block_ids=(1, 2),
        block_copies=(),
    )
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def runner():
    return FakeRunner(num_blocks=8, block_size=2, num_host_blocks=4, window=2, vocab_size=50)


def prefill(runner, blocks=(1, 2, 3), row=0, **how):
    return runner.run(
        StepPlan(
            step=0,
            row_setups=(setup(row),),
            block_updates=(BlockUpdate(row, 0, blocks),),
            chunks=(chunk(row, **how),),
        )
    )


def test_prefill_then_decode_draws_from_the_logical_tokens(runner):
    first = prefill(runner, sample=(0,)).samples[0].token_id
    plan = StepPlan(step=1, chunks=(chunk(tokens=None, position=5, sample=(0,)),))
    second = runner.run(plan).samples[0].token_id
    logical = list(enumerate(PROMPT))
    assert first == draw_token(9, logical, 0, SAMPLING, 50)
    assert second == draw_token(9, [*logical, (5, first)], 1, SAMPLING, 50)


def test_shared_prefix_may_be_read_by_another_row(runner):
    prefill(runner)
    runner.run(
        StepPlan(
            step=1,
            row_setups=(setup(1),),
            block_updates=(BlockUpdate(1, 0, (1, 2, 4)),),
            chunks=(chunk(1, (5,), position=4, sample=(1,)),),
        )
    )


def test_unwritten_slot_is_found(runner):
    with pytest.raises(AssertionError, match="never written"):
        prefill(runner, tokens=(3, 4, 5), position=2)


def test_slot_of_another_text_is_found(runner):
    prefill(runner)
    other = StepPlan(
        step=1,
        row_setups=(setup(1, tokens=(1, 9, 3, 4, 5)),),
        block_updates=(BlockUpdate(1, 0, (1, 2, 4)),),
        chunks=(chunk(1, (5,), position=4),),
    )
    with pytest.raises(AssertionError, match="not its history"):
        runner.run(other)


def test_reading_a_block_that_another_row_writes_is_found(runner):
    prefill(runner)
    plan = StepPlan(
        step=1,
        row_setups=(setup(0, (*PROMPT, 6)), setup(1, (*PROMPT, 6))),
        block_updates=(BlockUpdate(0, 0, (1, 2, 3)), BlockUpdate(1, 0, (1, 2, 3))),
        chunks=(chunk(0, (6,), position=5), chunk(1, (6,), position=5)),
    )
    with pytest.raises(AssertionError, match="both write block 3"):
        runner.run(plan)


def test_dummy_block_is_no_block(runner):
    with pytest.raises(AssertionError, match="block 0 is not one of"):
        prefill(runner, blocks=(1, 0, 2))


def test_compaction_keeps_the_newest_and_decoding_goes_on(runner):
    prefill(runner, sample=(0,), query_slot=0)
    assert runner.run(StepPlan(step=1, compactions=(compaction(),))).done_compactions == (0,)
    plan = StepPlan(
        step=2,
        block_updates=(BlockUpdate(0, 2, (4,)),),
        chunks=(chunk(tokens=None, position=5, start=3, sample=(0,)),),
    )
    assert len(runner.run(plan).samples) == 1
    held = [slot.position for block in (1, 2) for slot in runner.blocks[block]]
    assert sorted(held) == [0, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block_ids": (1, 2, 3)}, "3 blocks, not 2"),
        ({"num_keep": 4}, "keep 4 of 4"),
        ({"query_slot": 1}, "lacks the query"),
        ({"query_slot": None}, "needs a ring"),
        ({"stateful_len": 1}, "stateful_len"),
        ({"block_ids": (1, 5)}, "no copy"),
        ({"block_ids_before": (1, 2, 4)}, "not its table"),
        ({"logical_len": 4}, "logical_len"),
    ],
)
def test_wrong_compaction_is_named(runner, changes, complaint):
    prefill(runner, query_slot=0)
    with pytest.raises(AssertionError, match=complaint):
        runner.run(StepPlan(step=1, compactions=(compaction(**changes),)))


def test_compacting_a_block_in_place_that_another_row_shares_is_found(runner):
    prefill(runner, query_slot=0)
    runner.run(StepPlan(step=1, compactions=(compaction(),)))
    reader = StepPlan(
        step=2,
        row_setups=(setup(1, (*PROMPT, 6)),),
        block_updates=(BlockUpdate(1, 0, (1, 2, 3)),),
        chunks=(chunk(1, (6,), position=5),),
    )
    with pytest.raises(AssertionError, match="row 1"):
        runner.run(reader)


def coming_back(step, **parts):
    """What went to host blocks 0 to 2 comes back for row 2."""
    usual = {
        "swap_ins": tuple(BlockSwap(block, host) for block, host in ((6, 0), (7, 1), (8, 2))),
        "row_setups": (setup(2, (*PROMPT, 6)),),
        "block_updates": (BlockUpdate(2, 0, (6, 7, 8)),),
    }
    return StepPlan(step=step, **{**usual, **parts})


def test_swapped_blocks_come_back_whole(runner):
    prefill(runner)
    out = tuple(BlockSwap(block, host) for block, host in ((1, 0), (2, 1), (3, 2)))
    runner.run(StepPlan(step=1, swap_outs=out))
    runner.run(coming_back(step=2))
    plan = StepPlan(step=3, chunks=(chunk(2, (6,), position=5, sample=(2,)),))
    assert len(runner.run(plan).samples) == 1


def test_a_step_that_reads_what_comes_back_in_it_is_wrong(runner):
    prefill(runner)
    out = tuple(BlockSwap(block, host) for block, host in ((1, 0), (2, 1), (3, 2)))
    runner.run(StepPlan(step=1, swap_outs=out))
    runner.run(coming_back(step=2, chunks=(), swap_ins=()))
    runner.run(StepPlan(step=3, block_copies=(BlockCopy(1, 6), BlockCopy(2, 7), BlockCopy(3, 8))))
    hasty = (chunk(2, (6,), position=5, sample=(2,)),)
    with pytest.raises(AssertionError, match="before it has come back"):
        runner.run(coming_back(step=4, chunks=hasty))


def test_copies_read_all_sources_before_any_target_is_written(runner):
    prefill(runner)
    runner.run(StepPlan(step=1, block_copies=(BlockCopy(1, 2), BlockCopy(2, 4))))
    assert [slot.position for slot in runner.blocks[2]] == [0, 1]
    assert [slot.position for slot in runner.blocks[4]] == [2, 3]
