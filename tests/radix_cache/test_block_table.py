"""Examples for block tables and the laws they keep. Knows nothing of eviction order."""

import pytest

from zipage_lang.radix_cache.block_table import BlockTable


def test_lengths_of_a_table_that_was_never_compacted():
    table = BlockTable(namespace="", block_size=4, block_ids=[1, 2], resident_len=6, logical_len=6)
    assert table.plain_len == 6
    assert table.has_room
    assert not table.is_open
    assert [table.num_blocks_for(num_slots) for num_slots in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_full_last_block_has_no_room():
    table = BlockTable(namespace="", block_size=2, block_ids=[1], resident_len=2, logical_len=2)
    assert not table.has_room


def test_laws_notice_a_block_no_table_explains(cache, open_table):
    table = open_table([1, 2, 3])
    cache.append(table, 3)
    with pytest.raises(AssertionError, match="block 1: 1 of 0 holds"):
        cache.check_invariants([])
    cache.check_invariants([table])


def test_laws_notice_a_table_that_writes_into_its_locked_prefix(cache, prefill):
    table = prefill([1, 2, 3, 4])
    table.block_ids[0] = 9
    with pytest.raises(AssertionError, match="is locked"):
        cache.check_invariants([table])


def test_laws_notice_lengths_that_do_not_fit_the_blocks(cache, prefill):
    table = prefill([1, 2, 3, 4])
    table.resident_len = table.logical_len = 7
    with pytest.raises(AssertionError, match="2 blocks, not 4"):
        cache.check_invariants([table])


def test_laws_count_the_new_blocks_of_a_planned_compaction(cache, prefill):
    table = prefill([1, 2, 3, 4, 5])
    other = cache.fork(table)
    blocks = cache.plan_compaction(table, 0, 3)
    assert blocks.copies == ((1, 4), (2, 5))
    cache.check_invariants([table, other])
