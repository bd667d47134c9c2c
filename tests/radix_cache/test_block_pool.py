"""Examples for the block pool. Knows nothing of trees."""

import pytest

from zipage_lang.radix_cache.block_pool import BlockPool


def test_blocks_are_handed_out_from_one_and_never_the_dummy():
    pool = BlockPool(3)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.num_free == 0
    pool.check_invariants()


def test_block_is_free_only_when_tables_and_nodes_released_it():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.hold_for_node(block)
    assert (pool.num_free, pool.num_tree_only, pool.num_held) == (1, 0, 1)
    pool.release_for_table(block)
    assert (pool.num_free, pool.num_tree_only, pool.num_held) == (1, 1, 0)
    pool.hold_for_table(block)
    assert (pool.num_free, pool.num_tree_only, pool.num_held) == (1, 0, 1)
    pool.release_for_table(block)
    pool.release_for_node(block)
    assert (pool.num_free, pool.num_tree_only, pool.num_held) == (2, 0, 0)
    pool.check_invariants()


def test_released_block_is_the_next_to_be_handed_out():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.release_for_table(first)
    assert pool.allocate(1) == [first]
    assert not pool.is_shared(second)


def test_two_holds_of_any_kind_make_a_block_shared():
    pool = BlockPool(2)
    by_tables, by_both = pool.allocate(2)
    pool.hold_for_table(by_tables)
    pool.hold_for_node(by_both)
    assert pool.is_shared(by_tables)
    assert pool.is_shared(by_both)


def test_peak_counts_blocks_of_tables_only():
    pool = BlockPool(4)
    for block in pool.allocate(3):
        pool.hold_for_node(block)
        pool.release_for_table(block)
    pool.allocate(1)
    assert (pool.num_held, pool.peak_held) == (1, 3)


def test_more_than_free_is_not_handed_out():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 wanted of 2 free"):
        pool.allocate(3)


def test_holding_a_free_block_is_refused():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 2 is free"):
        pool.hold_for_node(2)
    with pytest.raises(AssertionError, match="block 1 has 0 table holds"):
        pool.release_for_table(1)


def test_invariants_notice_a_block_both_free_and_held():
    pool = BlockPool(2)
    pool.allocate(1)
    pool._free.append(1)
    with pytest.raises(AssertionError, match="free list"):
        pool.check_invariants()


def test_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
