"""Which decodes are read in halves, and which whole, from their lengths alone. Needs no card."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.last_round import MAX_HALVED_ROWS, halved_rows, is_faster_whole

HEADS = Heads(32, 8, 128, 16)
PER_ROUND, SMS = 33, 132


def halves(kv_lens, max_rows=99, per_round=PER_ROUND):
    return halved_rows(np.array(kv_lens, dtype=np.int32), per_round, 16, max_rows)


@pytest.mark.parametrize(
    ("num_rows", "num_halved"), [(32, 0), (33, 0), (34, 1), (39, 6), (40, 0), (66, 0), (71, 5)]
)
def test_as_many_rows_are_halved_as_the_last_round_would_have(num_rows, num_halved):
    groups = halves([2304] * num_rows)
    assert len(groups) == num_halved
    assert all(group.num_blocks == 72 for group in groups)


def test_the_shortest_rows_are_halved():
    kv_lens = [2000 + 10 * (row % 7) for row in range(35)]
    cut = [group.first_row for group in halves(kv_lens)]
    assert cut == [0, 7]
    assert sorted(kv_lens)[:2] == [kv_lens[row] for row in cut]


def test_short_rows_and_rows_much_shorter_than_the_longest_stay_whole():
    assert halves([700] * 35) == []
    assert halves([2304] * 34 + [900]) == []


def test_where_there_is_no_room_for_all_of_them_none_is_halved():
    assert halves([2304] * 36, max_rows=2) == []
    assert len(halves([2304] * 36, max_rows=3)) == 3


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=80), st.integers(1, 40))
def test_halved_rows_are_rows_of_their_own_in_order_and_keep_a_slot(kv_lens, per_round):
    groups = halves(kv_lens, per_round=per_round)
    rows = [group.first_row for group in groups]
    assert rows == sorted(set(rows))
    assert len(rows) <= MAX_HALVED_ROWS
    for group in groups:
        assert group.end_row == group.first_row + 1
        assert 0 < group.num_blocks * 16 < kv_lens[group.first_row]


def whole(kv_lens, heads=HEADS):
    return is_faster_whole(np.array(kv_lens, dtype=np.int32), heads, SMS)


@pytest.mark.parametrize(
    ("num_rows", "is_whole"), [(8, False), (16, False), (20, True), (33, True)]
)
@pytest.mark.parametrize("kv_len", [50, 1390, 2304, 30_000])
def test_equal_rows_are_read_whole_when_they_fill_the_card(num_rows, is_whole, kv_len):
    """As measured on an H200 with 1,390 and 2,304 slots."""
    assert whole([kv_len] * num_rows) is is_whole


def test_one_row_much_longer_than_the_others_is_split():
    assert not whole([20_000] + [500] * 23)
    assert whole([2_600] + [2_000] * 23)


@given(st.lists(st.integers(1, 40_000), min_size=20, max_size=33), st.integers(0, 19))
def test_a_longer_row_never_turns_split_rows_whole(kv_lens, at):
    """As soon as the longest row decides, more of it can only speak for splitting."""
    longest = max(kv_lens)
    if not whole(kv_lens):
        kv_lens[kv_lens.index(longest)] = longest + 1000
        assert not whole(kv_lens)
