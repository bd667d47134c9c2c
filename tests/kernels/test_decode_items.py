"""How decodes are divided for a card: all is read once, parts share a last round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.kernels.decode_items import (
    ITEM_NUMBERS,
    LAST_TILES,
    TILE_BLOCKS,
    WHOLE,
    divide,
    max_parts,
    part_counts,
)


def rounds_of(tiles, counts, num_ctas):
    """Tiles until the last CTA is done, each taking the next item when it is free."""
    free = np.zeros(num_ctas)
    for total, count in zip(tiles, counts, strict=True):
        for part in range(count):
            first = int(free.argmin())
            free[first] += total * (part + 1) // count - total * part // count
    return free.max()


@settings(max_examples=200, deadline=None)
@given(
    kv_lens=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    heads=st.integers(1, 8),
    num_ctas=st.integers(1, 64),
    num_padding=st.integers(0, 3),
)
def test_every_slot_of_every_pair_is_in_one_item(kv_lens, heads, num_ctas, num_padding):
    lens = np.array(kv_lens, dtype=np.int32)
    items = divide(lens, heads, num_ctas, num_padding, 16)
    num_blocks = -(-lens // 16)
    starts = np.cumsum(num_blocks) - num_blocks
    seen = {}
    places = []
    for row, head, first, blocks, last, part, first_part, num_parts in items.numbers.tolist():
        if row >= len(lens):
            assert (blocks, last, part, num_parts) == (1, 1, WHOLE, 1)
            assert first == num_blocks.sum() + row - len(lens)
            seen[row, head] = 1
            continue
        offset = first - starts[row]
        assert offset == seen.get((row, head), 0), "parts follow each other"
        assert offset % TILE_BLOCKS == 0
        seen[row, head] = offset + blocks
        ends = seen[row, head] == num_blocks[row]
        assert last == (lens[row] - 16 * (num_blocks[row] - 1) if ends else 16)
        assert (part == WHOLE) == (num_parts == 1)
        if part != WHOLE:
            assert first_part <= part < first_part + num_parts
            assert ends == (part == first_part + num_parts - 1)
            places.append(part)
    padded = [*num_blocks, *[1] * num_padding]
    assert seen == {(row, head): padded[row] for row in range(len(padded)) for head in range(heads)}
    assert sorted(places) == list(range(items.num_parts))
    assert items.num_parts <= max_parts(len(lens) * heads, num_ctas)
    assert items.numbers.dtype == np.int32
    assert items.numbers.shape[1] == ITEM_NUMBERS
    alone = divide(lens, heads, num_ctas, 0, 16)
    assert np.array_equal(alone.numbers, items.numbers[: len(alone.numbers)])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 20, 33, 34, 40, 48, 64, 67, 100, 128, 192])
def test_equal_rows_leave_the_card_idle_for_less_than_whole_pairs_would(num_rows):
    tiles = np.full(8 * num_rows, 36)
    counts = part_counts(tiles, 264)
    ideal, whole = tiles.sum() / 264, rounds_of(tiles, np.ones_like(counts), 264)
    found = rounds_of(tiles, counts, 264)
    assert found <= whole
    assert found <= ideal + LAST_TILES + 1, (found, ideal, counts[-1])


@settings(max_examples=300, deadline=None)
@given(
    tiles=st.lists(st.sampled_from([1, 2, 3, 20, 40, 1500, 20000]), min_size=1, max_size=300),
    num_ctas=st.sampled_from([1, 3, 64, 264]),
)
def test_parts_never_need_more_places_than_are_kept(tiles, num_ctas):
    counts = part_counts(np.array(tiles), num_ctas)
    assert (counts >= 1).all()
    assert (counts <= tiles).all()
    assert counts[counts > 1].sum() <= max_parts(len(tiles), num_ctas)


def test_full_rounds_are_not_cut():
    assert (part_counts(np.full(264, 30), 264) == 1).all()
    assert (part_counts(np.full(3 * 264, 30), 264) == 1).all()
    assert (part_counts(np.full(4 * 264 - 20, 30), 264) == 1).all()


def test_in_two_rounds_all_behind_the_first_are_cut():
    counts = part_counts(np.full(2 * 264 - 20, 36), 264)
    assert counts.tolist() == [1] * 264 + [6] * 244


def test_a_round_of_few_long_pairs_is_cut_however_many_are_ahead():
    counts = part_counts(np.full(3 * 264 + 8, 1500), 264)
    assert (counts[: 3 * 264] == 1).all()
    assert counts[3 * 264 :].sum() > 264


def test_items_go_row_by_row_so_that_heads_side_by_side_in_memory_are_read_together():
    items = divide(np.array([40, 900, 64], dtype=np.int32), 4, 12, 0, 16)
    assert items.numbers[:, :2].tolist() == sorted(items.numbers[:, :2].tolist())


def test_a_pair_much_longer_than_the_others_is_cut_wherever_it_stands():
    tiles = np.full(528, 10)
    tiles[3] = 200
    counts = part_counts(tiles, 264)
    assert counts[3] >= 9
    assert rounds_of(tiles, counts, 264) <= 2 * 10 + 25


def test_no_rows_make_no_items():
    items = divide(np.zeros(0, dtype=np.int32), 8, 264, 2, 16)
    assert items.numbers[:, 0].tolist() == [0] * 8 + [1] * 8
    assert items.numbers[:, 2].tolist() == [0] * 8 + [1] * 8
    assert items.num_parts == 0
