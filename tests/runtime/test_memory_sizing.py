"""How many blocks a pool gets, from numbers alone."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.runtime.config import CacheConfig
from zipage_lang.runtime.memory_sizing import (
    GIB,
    MemoryNeeds,
    asked_blocks,
    fitting_blocks,
    graph_bytes,
    unmeasured_blocks,
)

BLOCK_BYTES = 2_400_000
PARTS = ("others", "weights", "fixed", "step", "compaction", "graphs")


def needs(total=140 * GIB, **parts):
    return MemoryNeeds(total=total, **{name: parts.get(name, GIB) for name in PARTS})


def test_the_pool_fills_the_share_and_no_more():
    num_blocks = fitting_blocks(needs(), CacheConfig(gpu_memory_share=0.5), BLOCK_BYTES)
    with_dummy = (num_blocks + 1) * BLOCK_BYTES + 6 * GIB
    assert with_dummy <= 70 * GIB < with_dummy + BLOCK_BYTES


@given(
    st.integers(GIB, 200 * GIB),
    st.lists(st.integers(0, 20 * GIB), min_size=6, max_size=6),
    st.floats(0.05, 1.0),
    st.integers(1, 10**8),
)
def test_a_measured_pool_never_passes_the_share_and_wastes_less_than_a_block(
    total, parts, share, block_bytes
):
    measured = needs(total, **dict(zip(PARTS, parts, strict=True)))
    room = int(share * total) - measured.sum
    cache = CacheConfig(gpu_memory_share=share)
    if room < 2 * block_bytes:
        with pytest.raises(ValueError, match="no memory is left"):
            fitting_blocks(measured, cache, block_bytes)
    else:
        taken = (fitting_blocks(measured, cache, block_bytes) + 1) * block_bytes
        assert taken <= room < taken + block_bytes


@pytest.mark.parametrize("part", PARTS)
def test_every_part_makes_the_pool_smaller(part):
    small = fitting_blocks(needs(), CacheConfig(), BLOCK_BYTES)
    smaller = fitting_blocks(needs(**{part: 11 * GIB}), CacheConfig(), BLOCK_BYTES)
    assert small - smaller == pytest.approx(10 * GIB / BLOCK_BYTES, abs=1)


def test_explicit_memory_wins_over_the_share():
    cache = CacheConfig(kv_cache_memory=40.0, gpu_memory_share=0.2)
    assert fitting_blocks(needs(), cache, BLOCK_BYTES) == 40 * GIB // BLOCK_BYTES


def test_explicit_blocks_win_over_explicit_memory():
    cache = CacheConfig(num_blocks=7, kv_cache_memory=40.0)
    assert fitting_blocks(needs(), cache, BLOCK_BYTES) == 7


def test_an_explicit_pool_that_does_not_fit_is_refused_with_numbers_and_what_would():
    with pytest.raises(ValueError) as caught:
        fitting_blocks(
            needs(20 * GIB, weights=9 * GIB), CacheConfig(kv_cache_memory=8), BLOCK_BYTES
        )
    text = str(caught.value)
    for part in ("8.00 GiB", "6.00 GiB that are left", "of 20.00 GiB", "weights 9.00"):
        assert part in text
    at_most = int(re.search(r"at most (\d+) blocks", text)[1])
    cache = CacheConfig(num_blocks=at_most)
    assert fitting_blocks(needs(20 * GIB, weights=9 * GIB), cache, BLOCK_BYTES) == at_most
    cache = CacheConfig(num_blocks=at_most + 1)
    with pytest.raises(ValueError, match="does not fit"):
        fitting_blocks(needs(20 * GIB, weights=9 * GIB), cache, BLOCK_BYTES)


def test_a_full_card_is_refused_with_what_takes_its_memory():
    with pytest.raises(
        ValueError, match=r"gpu_memory_share=0.92 of 20.00 GiB: in use before 15.00"
    ):
        fitting_blocks(needs(20 * GIB, others=15 * GIB), CacheConfig(), BLOCK_BYTES)


def test_less_memory_than_a_block_is_refused():
    with pytest.raises(ValueError, match="less than one block of 2400000 bytes"):
        asked_blocks(CacheConfig(kv_cache_memory=0.001), BLOCK_BYTES)


def test_nothing_asked_is_a_gib_where_nothing_is_measured():
    assert asked_blocks(CacheConfig(), BLOCK_BYTES) is None
    assert unmeasured_blocks(CacheConfig(), BLOCK_BYTES) == GIB // BLOCK_BYTES
    assert unmeasured_blocks(CacheConfig(kv_cache_memory=2), BLOCK_BYTES) == 2 * GIB // BLOCK_BYTES
    assert unmeasured_blocks(CacheConfig(num_blocks=3), BLOCK_BYTES) == 3


def test_graphs_keep_logits_each_and_share_the_rest():
    assert graph_bytes(1000, 30, (1, 2, 4, 8), logits_row_bytes=5) == 1000 + 7 * 5 + 3 * 10


def test_graphs_that_fit_into_memory_the_first_left_over_cost_their_logits_at_least():
    assert graph_bytes(1000, 0, (1, 2, 4, 8), logits_row_bytes=5) == 1000 + 7 * 5


def test_second_graphs_of_buckets_cost_as_much_as_further_buckets():
    first = graph_bytes(1000, 30, (1, 2, 4, 8), logits_row_bytes=5)
    both = graph_bytes(1000, 30, (1, 2, 4, 8), logits_row_bytes=5, second_buckets=(4, 8))
    assert both == first + 12 * 5 + 2 * 10


@pytest.mark.parametrize("buckets", [(), (1,)])
def test_one_graph_or_none_costs_what_was_measured(buckets):
    assert graph_bytes(17, 0, buckets, logits_row_bytes=5) == 17
