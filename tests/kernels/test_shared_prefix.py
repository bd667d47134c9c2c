"""Which rows are grouped, against loops over blocks and over all choices of runs. Needs no card."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.kernels import shared_prefix
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.shared_prefix import (
    best_groups,
    num_tiles,
    shared_blocks,
    worthwhile_groups,
)

SLOT_BYTES = 4096  # of a layer at the shapes below
MANY = 10_000


@pytest.fixture(autouse=True)
def _a_cheap_merge(monkeypatch):
    """Small worlds show the rule; what a merge costs on a card is a matter of measurement."""
    monkeypatch.setattr(shared_prefix, "MERGE_BYTES", 16 * 2**20)


def shapes(group_size=4, block_size=16):
    return Heads(8 * group_size, 8, 128, block_size)


def tables_of(prefixes, kv_lens, block_size):
    """Each row begins with the given blocks and goes on with blocks of its own."""
    fresh, width = itertools.count(1000), max(kv_lens) // block_size + 3
    tables = np.full((len(prefixes), width), -1, dtype=np.int32)
    for table, prefix, kv_len in zip(tables, prefixes, kv_lens, strict=True):
        count = -(-kv_len // block_size)
        table[:count] = [*prefix, *itertools.islice(fresh, count)][:count]
    return tables, np.array(kv_lens, dtype=np.int32)


def groups_of(tables, kv_lens, max_tiles=MANY):
    return worthwhile_groups(shared_blocks(tables, kv_lens, 16), shapes(), max_tiles)


def samples(num_prompts, num_samples, prompt_len, kv_len, block_size=16):
    """Every prompt's samples side by side, and what they resume from their prompt."""
    blocks = prompt_len // block_size
    prefixes = [
        [prompt * 50 + block for block in range(1, blocks + 1)]
        for prompt in range(num_prompts)
        for _ in range(num_samples)
    ]
    return tables_of(prefixes, [kv_len] * len(prefixes), block_size)


@st.composite
def neighbours(draw):
    """Rows that each continue from some block of the row before, of any length."""
    block_size = draw(st.sampled_from([1, 2, 16]))
    fresh, rows = itertools.count(1), []
    for _ in range(draw(st.integers(1, 9))):
        kept = rows[-1][: draw(st.integers(0, len(rows[-1])))] if rows else []
        rows.append(kept + list(itertools.islice(fresh, draw(st.integers(0, 4)))) or [next(fresh)])
    kv_lens = [(len(row) - 1) * block_size + draw(st.integers(1, block_size)) for row in rows]
    tables = np.full((len(rows), max(map(len, rows)) + 1), -1, dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables, np.array(kv_lens, dtype=np.int32), block_size


@settings(deadline=None)
@given(neighbours())
def test_shared_blocks_equal_the_loop_over_blocks(world):
    tables, kv_lens, block_size = world
    found = shared_blocks(tables, kv_lens, block_size).tolist()
    for row, count in enumerate(found):
        most = min((kv_lens[row] - 1) // block_size, (kv_lens[row + 1] - 1) // block_size)
        same = 0
        while same < most and tables[row, same] == tables[row + 1, same]:
            same += 1
        assert count == same
    assert len(found) == len(tables) - 1


def saved_by(first, end, blocks, heads):
    tiles = num_tiles(end - first, heads)
    slots = (end - first - tiles) * blocks * heads.block_size
    return slots * SLOT_BYTES - tiles * heads.num_kv_heads * shared_prefix.ITEM_BYTES


def most_saved(shared, heads):
    """Over all choices of disjoint longest runs, whatever the cut."""
    runs = set()
    for cut in set(shared) - {0}:
        row = 0
        while row < len(shared):
            end = row
            while end < len(shared) and shared[end] >= cut:
                end += 1
            if end > row:
                runs.add((row, end + 1, min(shared[row:end])))
            row = end + 1
    best = 0
    for choice in itertools.chain.from_iterable(
        itertools.combinations(sorted(runs), count) for count in range(len(runs) + 1)
    ):
        if all(one[1] <= other[0] for one, other in itertools.pairwise(choice)):
            best = max(best, sum(saved_by(*run, heads) for run in choice))
    return best


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 9, 30, 200]), max_size=7), st.sampled_from([1, 3, 4, 8, 16])
)
def test_no_choice_of_runs_saves_more(shared, group_size):
    heads = shapes(group_size)
    groups = best_groups(np.array(shared, dtype=np.int64), heads)
    end = 0
    for group in groups:
        assert group.first_row >= end
        end = group.end_row
        assert group.num_blocks == min(shared[group.first_row : group.end_row - 1])
        assert group.saved_bytes == saved_by(*group[:3], heads) > 0
    assert sum(group.saved_bytes for group in groups) == most_saved(shared, heads)


def test_samples_of_a_prompt_are_a_group_each():
    tables, kv_lens = samples(24, 8, 220, 1390)
    groups = groups_of(tables, kv_lens)
    assert [group[:3] for group in groups] == [(8 * i, 8 * i + 8, 13) for i in range(24)]


def test_a_system_prompt_of_all_gives_way_to_longer_prompts_of_each():
    system, prompt = list(range(1, 5)), 20
    prefixes = [
        system + [100 * (row // 8) + block for block in range(10, 10 + prompt)] for row in range(64)
    ]
    tables, kv_lens = tables_of(prefixes, [900] * 64, 16)
    groups = groups_of(tables, kv_lens)
    assert [group[:3] for group in groups] == [(8 * i, 8 * i + 8, 24) for i in range(8)]


def test_a_long_trunk_is_one_group_though_branches_fork_again():
    trunk = list(range(1, 101))
    prefixes = [[*trunk, 200 + row // 2] for row in range(32)]
    tables, kv_lens = tables_of(prefixes, [2000] * 32, 16)
    groups = groups_of(tables, kv_lens)
    assert [group[:3] for group in groups] == [(0, 32, 100)]


@pytest.mark.parametrize("prompt_len", [0, 16, 40])
def test_too_little_to_pay_for_a_merge_is_left_alone(prompt_len):
    tables, kv_lens = samples(6, 8, prompt_len, 1000)
    assert groups_of(tables, kv_lens) == []


def test_the_newest_slot_is_never_shared():
    tables, kv_lens = samples(8, 8, 512, 512)
    groups = groups_of(tables, kv_lens)
    assert {group.num_blocks for group in groups} == {31}


def test_padding_rows_are_in_no_group():
    tables, kv_lens = samples(8, 8, 512, 700)
    padded = np.concatenate([tables, np.zeros_like(tables[:8])])
    lens = np.concatenate([kv_lens, np.ones(8, dtype=np.int32)])
    groups = groups_of(padded, lens)
    assert max(group.end_row for group in groups) == 64


def test_groups_that_save_least_make_room_for_the_others():
    longer, lens = samples(6, 8, 1600, 2000)
    shorter, _ = samples(6, 8, 800, 2000)
    order = [row for i in range(6) for row in range(16 * i, 16 * i + 16)]
    both = np.concatenate([np.stack([longer, shorter + 5000], 1).reshape(-1, longer.shape[1])])
    tables = np.concatenate([both[order][0::2], both[order][1::2]])
    groups = groups_of(tables, np.concatenate([lens, lens]), max_tiles=12)
    assert [group[:3] for group in groups] == [(8 * i, 8 * i + 8, 100) for i in range(6)]
