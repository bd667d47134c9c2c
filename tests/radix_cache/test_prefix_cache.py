"""Examples for the scheduler's door, with exact block ids. Knows nothing of random histories."""

import pytest

from zipage_lang.radix_cache.block_table import Append
from zipage_lang.radix_cache.prefix_cache import PrefixCache


def test_second_request_shares_full_blocks_and_computes_the_rest(cache, prefill, open_table):
    first = prefill([1, 2, 3, 4, 5])
    assert first.block_ids == [1, 2, 3]
    assert first.num_prefix_blocks == 2
    second = open_table([1, 2, 3, 4, 5])
    assert (second.block_ids, second.logical_len) == ([1, 2], 4)
    assert cache.append(second, 1) == Append(2, (4,), None)
    assert (cache.num_tokens_asked, cache.num_tokens_hit) == (10, 4)
    cache.check_invariants([first, second])


def test_at_least_one_token_is_left_to_compute(cache, prefill):
    prefill([1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4], namespace="", signature=None).num_tokens == 2
    assert cache.match([1, 2], namespace="", signature=None).num_tokens == 0
    assert cache.match([1, 2, 3], namespace="", signature=None).block_ids == (1,)


def test_plain_match_can_be_held_shorter(cache, prefill):
    table = prefill([1, 2, 3, 4, 5, 6])
    match = cache.match([1, 2, 3, 4, 5, 6, 7], namespace="", signature=None, max_plain_len=5)
    assert (match.block_ids, match.num_tokens) == ((1, 2), 4)
    held_back = cache.open(match)
    assert held_back.num_prefix_blocks == 2
    cache.check_invariants([table, held_back])


def test_match_takes_nothing_and_counts_nothing(cache, prefill):
    table = prefill([1, 2, 3, 4])
    cache.match([1, 2, 3, 4, 5], namespace="", signature="sig")
    assert (cache.num_tokens_asked, cache.num_tokens_hit) == (4, 0)
    cache.check_invariants([table])


def test_namespaces_share_nothing(cache, prefill):
    prefill([1, 2, 3, 4], namespace="a")
    assert cache.match([1, 2, 3, 4], namespace="b", signature=None).num_tokens == 0


def test_stale_match_is_refused(cache, prefill):
    cache.close(prefill([1, 2, 3, 4]), [1, 2, 3, 4], signature=None, stateful_len=0)
    match = cache.match([1, 2, 3, 4, 5], namespace="", signature=None)
    assert cache.flush() == 2
    with pytest.raises(AssertionError, match="stale match of 4 tokens"):
        cache.open(match)


def test_match_survives_a_split_of_its_edge(cache, prefill, open_table):
    table = prefill([1, 2, 3, 4, 5, 6])
    match = cache.match([1, 2, 3, 4, 9], namespace="", signature=None)
    other = open_table([1, 2, 9])
    late = cache.open(match)
    assert (late.block_ids, other.block_ids) == ([1, 2], [1])
    cache.check_invariants([table, late, other])


def test_append_evicts_the_oldest_of_the_tree_when_blocks_are_short(cache, prefill, open_table):
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):  # blocks 1 2, then 3 4
        cache.close(prefill(tokens), tokens, signature=None, stateful_len=0)
    table = open_table([9])
    assert cache.append(table, 16).block_ids == (2, 1, 5, 6, 7, 8, 9, 10)
    assert cache.match([1, 2, 3], namespace="", signature=None).num_tokens == 0
    assert cache.match([5, 6, 7, 8, 9], namespace="", signature=None).num_tokens == 4


def test_append_that_can_not_be_served_changes_nothing(cache, prefill, open_table):
    tokens = [1, 2, 3, 4]
    cache.close(prefill(tokens), tokens, signature=None, stateful_len=0)
    table = open_table([9])
    assert cache.num_available == 10
    assert cache.num_new_blocks(table, 21) == 11
    assert cache.append(table, 21) is None
    assert (table.block_ids, table.resident_len, cache.num_free) == ([], 0, 8)
    assert cache.append(table, 20) is not None


def test_fork_copies_the_partly_filled_last_block_when_written(cache, prefill):
    parent = prefill([1, 2, 3])
    child = cache.fork(parent)
    assert child.block_ids == [1, 2]
    assert cache.num_new_blocks(child, 1) == 1
    assert cache.append(child, 1) == Append(1, (3,), (2, 3))
    # Now the parent is alone with block 2 and writes in place.
    assert cache.append(parent, 1) == Append(2, (), None)
    assert (parent.block_ids, child.block_ids) == ([1, 2], [1, 3])
    cache.check_invariants([parent, child])


def test_eight_branches_hold_their_prefix_once(cache, prefill):
    parent = prefill([1, 2, 3, 4, 5, 6])
    branches = [cache.fork(parent) for _ in range(7)]
    assert cache.num_free == 7
    for branch in branches:
        assert cache.append(branch, 1).copy is None
    assert cache.num_free == 0
    cache.check_invariants([parent, *branches])


def test_commit_does_not_share_what_another_request_computed_too(cache, open_table):
    tokens = [1, 2, 3, 4, 5, 6]
    first, second = open_table(tokens), open_table(tokens)
    cache.append(first, 4)
    cache.append(second, 6)
    cache.commit(first, tokens, 4)
    cache.commit(second, tokens, 6)
    assert (first.num_prefix_blocks, second.num_prefix_blocks) == (2, 0)
    # At its end the second adds what the tree lacks, below the path of the first.
    cache.close(second, tokens, signature=None, stateful_len=0)
    assert cache.match([*tokens, 7], namespace="", signature=None).block_ids == (1, 2, 5)
    cache.check_invariants([first])


def test_fork_commits_the_blocks_it_shares(cache, prefill):
    parent = prefill([1, 2, 3])
    cache.append(parent, 1)
    child = cache.fork(parent)
    cache.commit(parent, [1, 2, 3, 4], 4)
    cache.commit(child, [1, 2, 3, 4], 4)
    assert (parent.num_prefix_blocks, child.num_prefix_blocks) == (2, 2)
    cache.check_invariants([parent, child])


def test_growing_request_stays_one_edge(cache, open_table):
    table = open_table([1])
    tokens: list[int] = []
    for token in range(12):
        tokens.append(token)
        cache.append(table, 1)
        cache.commit(table, tokens, len(tokens))
    assert cache.stats()["num_plain_nodes"] == 2  # root and edge
    assert table.num_prefix_blocks == 6


def test_committed_block_is_copied_after_a_truncation_into_it(cache, prefill):
    table = prefill([1, 2, 3, 4])
    cache.truncate(table, 1)
    assert (table.num_prefix_blocks, table.block_ids) == (1, [1, 2])
    assert cache.append(table, 1) == Append(1, (3,), (2, 3))
    assert cache.match([1, 2, 3, 4, 5], namespace="", signature=None).block_ids == (1, 2)
    cache.check_invariants([table])


def test_copy_is_made_even_if_its_own_allocation_evicts_the_other_holder(cache, prefill):
    """Eviction can leave the table alone with its last block after the copy was counted."""
    table = prefill([1, 2, 3, 4])
    cache.truncate(table, 1)
    cache.close(prefill([7] * 14), [7] * 14, signature=None, stateful_len=0)
    assert cache.num_free == 1
    assert cache.append(table, 3) == Append(1, (9, 8), (2, 9))
    assert table.block_ids == [1, 9, 8]
    cache.check_invariants([table])


def test_truncate_releases_the_blocks_no_longer_needed(cache, prefill):
    table = prefill([1, 2, 3, 4, 5])
    cache.truncate(table, 3)
    assert (table.block_ids, table.resident_len, table.logical_len) == ([1], 2, 2)
    assert cache.num_free == 8  # block 2 stays in the tree, block 3 came home
    assert cache.num_available == 9


def test_drop_leaves_only_what_was_committed(cache, open_table):
    table = open_table([1, 2, 3, 4])
    cache.append(table, 4)
    cache.commit(table, [1, 2, 3, 4], 2)
    cache.drop(table)
    assert cache.match([1, 2, 3, 4, 5], namespace="", signature=None).block_ids == (1,)
    assert (cache.num_free, cache.num_available) == (9, 10)


def test_disabled_cache_keeps_nothing_and_still_forks():
    cache = PrefixCache(4, 2, enabled=False)
    table = cache.open(cache.match([1, 2, 3], namespace="", signature=None))
    cache.append(table, 3)
    cache.commit(table, [1, 2, 3], 3)
    branch = cache.fork(table)
    assert cache.append(branch, 1) == Append(1, (3,), (2, 3))
    cache.close(table, [1, 2, 3], signature=None, stateful_len=0)
    cache.close(branch, [1, 2, 3, 4], signature=None, stateful_len=0)
    assert cache.num_free == 4
    assert cache.match([1, 2, 3], namespace="", signature=None).num_tokens == 0


def test_compaction_in_private_blocks_copies_nothing(cache, open_table):
    table = open_table([1])
    cache.append(table, 8)
    blocks = cache.plan_compaction(table, 2, 3)
    assert blocks.block_ids_before == (1, 2, 3, 4)
    assert (blocks.block_ids, blocks.copies) == ((1, 2, 3), ())
    assert table.block_ids == [1, 2, 3, 4]
    cache.finish_compaction(table, blocks, resident_len=5)
    assert (table.block_ids, table.resident_len, table.logical_len) == ([1, 2, 3], 5, 8)
    assert (table.is_compacted, table.plain_len, cache.num_free) == (True, 2, 7)


def test_compaction_takes_over_its_own_committed_blocks(cache, prefill):
    table = prefill([1, 2, 3, 4, 5, 6, 7])
    blocks = cache.plan_compaction(table, 3, 2)
    assert (blocks.block_ids, blocks.copies) == ((1, 2, 3), ())
    cache.finish_compaction(table, blocks, resident_len=5)
    # Block 1 lies wholly in the protected part: it stays shared at its place.
    assert table.num_prefix_blocks == 1
    assert cache.match([1, 2, 3, 4, 5], namespace="", signature=None).block_ids == (1,)
    assert cache.stats()["num_taken_over_blocks"] == 1  # block 3 left the tree with block 2
    cache.check_invariants([table])


def test_compaction_copies_what_another_table_holds(cache, prefill):
    table = prefill([1, 2, 3, 4, 5])
    other = cache.fork(table)
    blocks = cache.plan_compaction(table, 2, 2)
    assert (blocks.block_ids, blocks.copies) == ((1, 4), ((2, 4),))
    cache.finish_compaction(table, blocks, resident_len=4)
    assert (table.block_ids, other.block_ids) == ([1, 4], [1, 2, 3])
    cache.check_invariants([table, other])


def test_compaction_copies_what_another_request_has_locked(cache, prefill, open_table):
    table = prefill([1, 2, 3, 4, 5, 6])
    other = open_table([1, 2, 3, 4, 9])
    blocks = cache.plan_compaction(table, 0, 6)
    assert (blocks.block_ids, blocks.copies) == ((4, 5, 3), ((1, 4), (2, 5)))
    cache.cancel_compaction(table, blocks)
    assert cache.num_free == 7
    cache.commit(table, [1, 2, 3, 4, 5, 6], 6)
    assert table.num_prefix_blocks == 3
    cache.check_invariants([table, other])


def test_compaction_that_finds_no_blocks_is_not_planned():
    cache = PrefixCache(3, 2)
    table = cache.open(cache.match([1], namespace="", signature=None))
    cache.append(table, 5)
    other = cache.fork(table)
    assert cache.plan_compaction(table, 0, 4) is None
    assert not table.is_compacting
    cache.check_invariants([table, other])


def test_table_under_compaction_is_left_alone(cache, prefill):
    table = prefill([1, 2, 3, 4])
    cache.plan_compaction(table, 0, 2)
    with pytest.raises(AssertionError, match="finish or cancel"):
        cache.fork(table)
    with pytest.raises(AssertionError, match="finish or cancel"):
        cache.append(table, 1)


def test_next_turn_continues_from_the_compacted_state(cache, prefill, open_table, compact):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table = prefill(tokens)
    compact(table, 2, 3)
    cache.close(table, tokens, signature="sig", stateful_len=3)
    match = cache.match([*tokens, 9], namespace="", signature="sig")
    assert (match.num_tokens, match.resident_len, match.is_compacted) == (8, 5, True)
    assert (match.block_ids, match.num_prefix_blocks) == ((1, 2, 3), 1)
    assert match.stateful_len == 3
    turn = cache.open(match)
    assert (turn.is_compacted, turn.plain_len, turn.compacted_len) == (True, 2, 5)
    cache.check_invariants([turn])


@pytest.mark.parametrize("signature", ["other", None])
def test_compacted_state_is_for_its_own_signature_only(cache, prefill, compact, signature):
    tokens = [1, 2, 3, 4, 5, 6]
    table = prefill(tokens)
    compact(table, 2, 2)
    cache.close(table, tokens, signature="sig", stateful_len=0)
    match = cache.match([*tokens, 7], namespace="", signature=signature)
    assert (match.is_compacted, match.num_tokens) == (False, 2)


def test_eight_branches_of_a_compacted_thought_hold_one_copy(cache, prefill, open_table, compact):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table = prefill(tokens)
    compact(table, 2, 4)
    cache.close(table, tokens, signature="sig", stateful_len=4)
    branches = [open_table([*tokens, 9]) for _ in range(7)]
    assert cache.num_free == 7
    assert all(branch.block_ids == [1, 2, 3] for branch in branches)
    assert [cache.append(branch, 1).copy for branch in branches] == [None] * 7
    cache.check_invariants(branches)


def test_last_branch_of_a_compacted_state_takes_its_blocks_over(
    cache, prefill, open_table, compact
):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table = prefill(tokens)
    compact(table, 2, 4)
    cache.close(table, tokens, signature="sig", stateful_len=4)
    first, second = open_table([*tokens, 9]), open_table([*tokens, 9])
    blocks = cache.plan_compaction(first, 2, 2)
    assert blocks.copies == ((2, 4),)
    cache.finish_compaction(first, blocks, resident_len=4)
    blocks = cache.plan_compaction(second, 2, 2)
    assert (blocks.block_ids, blocks.copies) == ((1, 2), ())
    cache.finish_compaction(second, blocks, resident_len=4)
    assert not cache.match([*tokens, 9], namespace="", signature="sig").is_compacted
    cache.check_invariants([first, second])


def test_takeover_evicts_every_compacted_state_with_the_block(cache, prefill, open_table, compact):
    tokens = [1, 2, 3, 4, 5, 6]
    table = prefill(tokens)
    compact(table, 2, 2)
    cache.close(table, tokens, signature="sig", stateful_len=2)
    turn = open_table([*tokens, 7])
    cache.append(turn, 1)
    cache.close(turn, [*tokens, 7], signature="sig", stateful_len=2)
    last = open_table([*tokens, 7, 8])
    assert (last.block_ids, cache.stats()["num_atomic_nodes"]) == ([1, 2, 3], 2)
    assert cache.plan_compaction(last, 2, 2).copies == ()
    assert cache.stats()["num_atomic_nodes"] == 0
    cache.check_invariants([last])


def test_writing_behind_a_compacted_state_unlocks_it(cache, prefill, open_table, compact):
    tokens = [1, 2, 3, 4, 5, 6]
    table = prefill(tokens)
    compact(table, 2, 3)
    cache.close(table, tokens, signature="sig", stateful_len=0)
    turn = open_table([*tokens, 7])
    assert cache.append(turn, 1) == Append(2, (4,), (3, 4))
    assert turn.block_ids == [1, 2, 4]
    assert cache.num_available == cache.num_free + 1  # block 3 is only the tree's
    assert cache.flush() == 1
    cache.check_invariants([turn])


def test_protected_blocks_never_committed_become_plain_at_the_end(cache, open_table, compact):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table = open_table(tokens)
    cache.append(table, 8)
    compact(table, 5, 1)
    assert table.num_prefix_blocks == 0
    cache.close(table, tokens, signature="sig", stateful_len=1)
    plain = cache.match([1, 2, 3, 4, 9], namespace="", signature="sig")
    assert (plain.block_ids, plain.is_compacted) == ((1, 2), False)
    whole = cache.match([*tokens, 9], namespace="", signature="sig")
    assert (whole.block_ids, whole.num_prefix_blocks) == ((1, 2, 3), 2)


def test_closing_the_same_compacted_state_again_keeps_one_node(cache, prefill, compact):
    tokens = [1, 2, 3, 4, 5, 6]
    for _ in range(2):
        table = prefill(tokens)
        compact(table, 2, 2)
        cache.close(table, tokens, signature="sig", stateful_len=0)
    assert cache.stats()["num_atomic_nodes"] == 1
    assert (cache.num_free, cache.num_available) == (8, 10)


def test_commit_of_a_compacted_table_shares_nothing(cache, prefill, compact):
    tokens = [1, 2, 3, 4, 5, 6]
    table = prefill(tokens)
    compact(table, 2, 2)
    cache.commit(table, tokens, 6)
    assert cache.match([*tokens, 7], namespace="", signature=None).num_tokens == 2


def test_truncate_does_not_reach_behind_the_last_compaction(cache, prefill, compact):
    table = prefill([1, 2, 3, 4, 5, 6])
    compact(table, 2, 2)
    cache.append(table, 2)
    cache.truncate(table, 2)
    assert (table.resident_len, table.logical_len) == (4, 6)
    with pytest.raises(AssertionError, match="4 must stay"):
        cache.truncate(table, 1)


def test_swapped_table_comes_back_behind_the_plain_prefix_that_is_still_there(
    cache, prefill, compact
):
    table = prefill([1, 2, 3, 4, 5, 6])
    compact(table, 2, 3)
    swapped = cache.swap_out(table)
    assert (swapped.num_blocks, cache.num_available) == (3, 10)
    back = cache.swap_in(swapped, [1, 2, 3, 4, 5, 6])
    assert (back.resident_len, back.logical_len, back.is_compacted) == (5, 6, True)
    assert (len(back.block_ids), back.num_prefix_blocks) == (3, 1)
    cache.check_invariants([back])


def test_swapped_table_comes_back_in_private_blocks_where_the_tree_has_nothing(cache, prefill):
    swapped = cache.swap_out(prefill([1, 2, 3, 4, 5, 6]))
    cache.flush()
    back = cache.swap_in(swapped, [1, 2, 3, 4, 5, 6])
    assert (len(back.block_ids), back.num_prefix_blocks) == (3, 0)
    cache.check_invariants([back])


def test_swap_in_waits_for_blocks(cache, prefill, open_table):
    swapped = cache.swap_out(prefill([1, 2, 3, 4]))
    cache.flush()
    table = open_table([9])
    cache.append(table, 18)
    assert cache.swap_in(swapped, [1, 2, 3, 4]) is None
    cache.truncate(table, 2)
    assert cache.swap_in(swapped, [1, 2, 3, 4]) is not None


def test_flush_leaves_what_is_in_use(cache, prefill, open_table):
    cache.close(prefill([1, 2, 3, 4]), [1, 2, 3, 4], signature=None, stateful_len=0)
    table = open_table([1, 2, 9])
    assert cache.flush() == 1
    assert table.block_ids == [1]
    cache.check_invariants([table])


def test_a_flush_counts_the_peak_anew_from_what_is_held(cache, prefill):
    first, second = prefill([1, 1, 0, 0]), prefill([0, 1, 1, 0])
    cache.drop(second)
    assert cache.peak_held == 4
    cache.flush()
    assert cache.peak_held == 2
    cache.drop(first)


def test_peak_counts_what_tables_held_at_once(cache, prefill):
    for start in (1, 11):
        tokens = list(range(start, start + 6))
        cache.close(prefill(tokens), tokens, signature=None, stateful_len=0)
    assert cache.peak_held == 3
    assert cache.stats()["num_tree_only"] == 6


def test_whole_life_works_with_one_slot_per_block():
    cache = PrefixCache(8, 1)
    table = cache.open(cache.match([1, 2, 3, 4], namespace="", signature="sig"))
    cache.append(table, 4)
    cache.commit(table, [1, 2, 3, 4], 4)
    blocks = cache.plan_compaction(table, 1, 1)
    cache.finish_compaction(table, blocks, resident_len=2)
    cache.close(table, [1, 2, 3, 4], signature="sig", stateful_len=1)
    match = cache.match([1, 2, 3, 4, 5], namespace="", signature="sig")
    assert (match.num_tokens, match.resident_len, match.block_ids) == (4, 2, (1, 2))
    cache.check_invariants([])


def test_block_size_zero_is_refused():
    with pytest.raises(ValueError, match="block_size=0"):
        PrefixCache(4, 0)
