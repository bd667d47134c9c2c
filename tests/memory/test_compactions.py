"""Compactions while memory is refused: the cache ends as ever, but for rows that are said to fail.

Every allocation of a compaction is refused in turn, alone or with all that follow for a while.
"""

import pytest
import torch
from test_support.refusals import Refusals, RefusedMemory

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.out_of_memory import Retries
from zipage_lang.runtime.policies.registry import load_policies
from zipage_lang.runtime.step_plan import BlockCopy, Compaction

SHAPE = KVShape(num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS, WINDOW = 4, 60, 3, 16
TAIL_LEN, NUM_KEEP, PROTECTED_LEN = 26, 14, 3
BLOCKS_PER_ROW = 8
POLICIES = load_policies()
NAMES = ["zipage", "streaming", "random", "snapkv"]
POOLS = ("kv", "score", "position")


def make_cache():
    cache = KVCache(
        SHAPE,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_query_slots=NUM_ROWS,
        window=WINDOW,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    for tensor in (cache.kv, cache.score, cache.queries, cache.query_lse):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for row in range(NUM_ROWS):
        for slot in range(PROTECTED_LEN + TAIL_LEN):
            block_id = tables(row)[slot // BLOCK_SIZE]
            cache.position[:, block_id, slot % BLOCK_SIZE] = slot
    return cache


def tables(row):
    first = 1 + row * BLOCKS_PER_ROW
    return tuple(range(first, first + BLOCKS_PER_ROW))


def compactions(name):
    """The last row's first tail block is shared, so it is copied before it is written."""
    num_kept_blocks = -(-(PROTECTED_LEN + NUM_KEEP) // BLOCK_SIZE)
    for row in range(NUM_ROWS):
        kept, copies = tables(row)[:num_kept_blocks], ()
        if row == NUM_ROWS - 1:
            copies = (BlockCopy(kept[1], 50),)
            kept = (kept[0], 50, *kept[2:])
        needs_queries = POLICIES[name].num_queries > 0
        yield Compaction(
            ident=row,
            row=row,
            policy=name,
            protected_len=PROTECTED_LEN,
            tail_len=TAIL_LEN,
            num_keep=NUM_KEEP,
            stateful_len=0,
            logical_len=PROTECTED_LEN + TAIL_LEN,
            query_slot=row if needs_queries else None,
            num_queries=WINDOW if needs_queries else 0,
            seed=row,
            block_ids_before=tables(row),
            block_ids=kept,
            block_copies=copies,
        )


def run(name, refusals, max_pass_slots=None):
    """(cache, failed rows, refusals that were counted)."""
    cache, retries = make_cache(), Retries()
    compressor = KVCompressor(
        cache, choose_backend("cpu"), POLICIES, max_pass_slots=max_pass_slots, retries=retries
    )
    with RefusedMemory(refusals):
        failed = compressor.run(tuple(compactions(name)))
    return cache, failed, retries.num_refusals


def kept_by(cache, name, row):
    """All that the row's kept slots hold, in order of position per head, whatever their place."""
    blocks = list(compactions(name))[row].block_ids
    found = []
    for pool in POOLS:
        values = getattr(cache, pool)[:, list(blocks)]
        if pool == "kv":
            values = values.movedim(2, 3)  # [num_layers, num_blocks, block_size, 2, ...]
        found.append(values.flatten(1, 2)[:, : PROTECTED_LEN + NUM_KEEP])
    return found


def assert_same(cache, expected, name, failed):
    for row in range(NUM_ROWS):
        if row in failed:
            continue
        pairs = zip(kept_by(cache, name, row), kept_by(expected, name, row), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs), (name, row)


@pytest.mark.parametrize("count", [1, 2, 4, 9])
@pytest.mark.parametrize("name", NAMES)
def test_refusals_one_after_the_other_change_no_kept_slot(name, count):
    everything, step = Refusals(), 1 if (name, count) == ("zipage", 1) else 5
    expected, failed, _ = run(name, everything)
    assert not failed
    num_failed = 0
    for first in range(0, everything.num_asked, step):
        refusals = Refusals(numbers=range(first, first + count).__contains__)
        cache, failed, num_counted = run(name, refusals)
        assert num_counted > 0
        assert_same(cache, expected, name, failed)
        num_failed += len(failed)
    if count == 1:  # trying again was enough
        assert num_failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_little_memory_works_on_fewer_rows_and_layers_at_a_time(name):
    """Scratch of one layer of one row fits, and not much more."""
    expected, _, _ = run(name, Refusals())
    largest = max(
        size
        for size in (2**power for power in range(6, 16))
        if run(name, Refusals(max_elements=size))[1]
    )
    cache, failed, num_counted = run(name, Refusals(max_elements=2 * largest))
    assert not failed
    assert num_counted > 0
    assert_same(cache, expected, name, failed)


def test_without_memory_every_row_fails_and_says_so():
    _, failed, _ = run("zipage", Refusals(numbers=lambda _: True))
    assert failed == frozenset(range(NUM_ROWS))


def test_rows_that_fail_leave_the_others_be_in_passes_of_one_layer():
    expected, _, _ = run("zipage", Refusals(), max_pass_slots=1)
    cache, failed, _ = run("zipage", Refusals(numbers=range(10, 13).__contains__), max_pass_slots=1)
    assert 0 < len(failed) < NUM_ROWS
    assert_same(cache, expected, "zipage", failed)
