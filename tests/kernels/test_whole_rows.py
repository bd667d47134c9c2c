"""Which few decodes are read whole, from their lengths alone. Needs no card."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.whole_rows import is_faster_whole, may_be_faster_whole

HEADS, SMS = Heads(32, 8, 128, 16), 132


def whole(kv_lens, heads=HEADS):
    return is_faster_whole(np.array(kv_lens, dtype=np.int32), heads, SMS)


@pytest.mark.parametrize(
    ("num_rows", "is_whole"), [(8, False), (16, False), (20, True), (33, True)]
)
@pytest.mark.parametrize("kv_len", [50, 1390, 2304, 30_000])
def test_equal_rows_are_read_whole_when_they_fill_the_card(num_rows, is_whole, kv_len):
    """As measured on an H200 with 1,390 and 2,304 slots."""
    assert whole([kv_len] * num_rows) is is_whole
    assert may_be_faster_whole(num_rows, HEADS, SMS) is is_whole


@pytest.mark.parametrize("heads", [(32, 32), (16, 16), (40, 8), (64, 8), (8, 4), (4, 1)])
def test_what_counts_is_pairs_of_rows_and_kv_heads(heads):
    heads = Heads(*heads, 128, 16)
    least = next(rows for rows in range(1, 999) if may_be_faster_whole(rows, heads, SMS))
    assert 158 < least * heads.num_kv_heads <= 158 + heads.num_kv_heads
    assert whole([2000] * least, heads)
    assert not whole([2000] * (least - 1), heads)


def test_one_row_much_longer_than_the_others_is_split():
    assert not whole([20_000] + [500] * 23)
    assert whole([2_600] + [2_000] * 23)


@given(st.lists(st.integers(1, 40_000), min_size=20, max_size=33))
def test_a_longer_row_never_turns_split_rows_whole(kv_lens):
    """As soon as the longest row decides, more of it can only speak for splitting."""
    if not whole(kv_lens):
        kv_lens[kv_lens.index(max(kv_lens))] += 1000
        assert not whole(kv_lens)
