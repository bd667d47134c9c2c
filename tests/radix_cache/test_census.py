"""Whose each block is, in worlds small enough to be told by hand."""

from zipage_lang.radix_cache.census import Owner

FREE, PREFIX, CACHED, TAIL, COMPACTED, OLD, HELD = Owner


def owners_of(cache, block_ids, running=(), held=()):
    owners = cache.owners(running, held)
    return [Owner(owners[block_id]) for block_id in block_ids]


def test_a_prompt_in_use_is_prefix_and_what_follows_is_tail(cache, prefill):
    table = prefill([1, 2, 3, 4])
    cache.append(table, 3)
    assert owners_of(cache, table.block_ids, [table]) == [PREFIX, PREFIX, TAIL, TAIL]


def test_what_ended_requests_left_is_cached(cache, prefill):
    table = prefill([1, 2, 3, 4])
    block_ids = list(table.block_ids)
    cache.close(table, [1, 2, 3, 4], signature=None, stateful_len=0)
    assert owners_of(cache, block_ids) == [CACHED, CACHED]


def test_a_tail_that_branches_share_counts_as_prefix(cache, prefill):
    table = prefill([1, 2])
    cache.append(table, 2)
    branch = cache.fork(table)
    assert owners_of(cache, table.block_ids, [table, branch]) == [PREFIX, PREFIX]


def test_compacted_blocks_end_where_new_tokens_begin(cache, prefill, compact):
    table = prefill([1, 2, 3, 4])
    cache.append(table, 6)
    compact(table, 4, 2)
    cache.append(table, 3)
    assert owners_of(cache, table.block_ids, [table]) == [PREFIX, PREFIX, COMPACTED, TAIL, TAIL]


def test_a_compacted_state_left_behind_is_told_apart_until_somebody_goes_on_from_it(
    cache, prefill, compact, open_table
):
    token_ids = [1, 2, 3, 4, 5, 6, 7, 8]
    table = prefill(token_ids[:4])
    cache.append(table, 4)
    compact(table, 4, 2)
    block_ids = list(table.block_ids)
    cache.close(table, token_ids, signature="sig", stateful_len=2)
    assert owners_of(cache, block_ids) == [CACHED, CACHED, OLD]
    again = open_table([*token_ids, 9])
    assert again.is_compacted
    assert owners_of(cache, block_ids, [again]) == [PREFIX, PREFIX, COMPACTED]


def test_blocks_that_only_held_states_have_are_held(cache, prefill, open_table):
    held = prefill([1, 2, 3, 4, 5, 6])
    running = open_table([1, 2, 3, 4, 9])
    cache.append(running, 1)
    owners = owners_of(cache, held.block_ids, [running], [held])
    assert owners == [PREFIX, PREFIX, HELD]
    assert owners_of(cache, running.block_ids[2:], [running], [held]) == [TAIL]


def test_every_other_block_is_free(cache, prefill):
    table = prefill([1, 2, 3, 4])
    owners = cache.owners([table], [])
    assert len(owners) == cache.num_blocks + 1
    assert owners.count(FREE) == 1 + cache.num_free


def test_lookups_are_counted_on_all_they_run_through(cache, prefill, open_table):
    prefill([1, 2, 3, 4])
    open_table([1, 2, 3, 4, 5])
    open_table([1, 2, 9])
    (root,) = cache.roots()
    (first,) = root.children.values()
    (second,) = first.children.values()
    assert (root.num_hits, first.num_hits, second.num_hits) == (2, 2, 1)


def test_a_lookup_that_finds_nothing_is_no_hit(cache, prefill, open_table):
    prefill([1, 2, 3, 4])
    open_table([7, 8, 9])
    (root,) = cache.roots()
    assert root.num_hits == 0
