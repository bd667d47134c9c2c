"""Hole filling: kept slots survive, at most E move, nothing else is written."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.kernels.reference.compact import fill_holes

NUM_HEADS, HEAD_DIM = 2, 3


@st.composite
def worlds(draw):
    """(block_size, [(tail_len, num_keep, kept slots of each head)])."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        tail_len = draw(st.integers(1, 9))
        num_keep = draw(st.integers(1, tail_len))
        kept = [set(draw(st.permutations(range(tail_len)))[:num_keep]) for _ in range(NUM_HEADS)]
        rows.append((tail_len, num_keep, kept))
    return block_size, rows


class Pool:
    """Blocks in which every slot of every head holds its own number; unused slots hold NaN."""

    def __init__(self, block_size, rows):
        used = sum(tail_len for tail_len, _, _ in rows)
        num_blocks = 2 + -(-used // block_size)
        generator = torch.Generator().manual_seed(used)
        order = torch.randperm(num_blocks * block_size, generator=generator)[:used]
        self.kv = torch.full((num_blocks, 2, block_size, NUM_HEADS, HEAD_DIM), math.nan)
        self.score = torch.full((num_blocks, block_size, NUM_HEADS), math.nan)
        self.position = torch.full((num_blocks, block_size, NUM_HEADS), -7, dtype=torch.int32)
        for slot in order.tolist():
            for head in range(NUM_HEADS):
                key = self.kv[slot // block_size, :, slot % block_size, head]
                key[0], key[1] = slot * 10 + head, -slot * 10 - head
        self.block_size = block_size
        self.slots = torch.full((len(rows), max(row[0] for row in rows) + 1), -1)
        start = 0
        for i, (tail_len, _, _) in enumerate(rows):
            self.slots[i, :tail_len] = order[start : start + tail_len]
            start += tail_len

    def key_number(self, slot, head):
        return self.kv[slot // self.block_size, 0, slot % self.block_size, head, 0].item()

    def fill(self, rows, with_scores=True):
        shape = (len(rows), NUM_HEADS, self.slots.shape[1])
        keep = torch.zeros(shape, dtype=torch.bool)
        for i, (_, _, kept) in enumerate(rows):
            for head in range(NUM_HEADS):
                keep[i, head, list(kept[head])] = True
        positions = torch.arange(shape[2], dtype=torch.int32).expand(shape) + 100
        scores = positions / 8 if with_scores else None
        num_keep = torch.tensor([row[1] for row in rows])
        fill_holes(
            self.kv, self.score, self.position, self.slots, keep, num_keep, positions, scores
        )


def layout(num_keep, tail_len, kept):
    """Tail slot whose content ends up in each kept place, the slow way."""
    movers = iter(slot for slot in range(num_keep, tail_len) if slot in kept)
    return [slot if slot in kept else next(movers) for slot in range(num_keep)]


@settings(max_examples=120, deadline=None)
@given(worlds())
def test_movers_fill_holes_in_order_and_nothing_else_changes(world):
    block_size, rows = world
    pool = Pool(block_size, rows)
    expected = pool.kv.clone()
    for i, (tail_len, num_keep, kept) in enumerate(rows):
        for head in range(NUM_HEADS):
            for place, source in enumerate(layout(num_keep, tail_len, kept[head])):
                to, at = divmod(pool.slots[i, place].item(), block_size)
                block, offset = divmod(pool.slots[i, source].item(), block_size)
                expected[to, :, at, head] = pool.kv[block, :, offset, head]
    pool.fill(rows)
    assert torch.equal(pool.kv.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@settings(max_examples=120, deadline=None)
@given(worlds())
def test_position_and_score_of_kept_slots_follow_their_keys(world):
    block_size, rows = world
    pool = Pool(block_size, rows)
    pool.fill(rows)
    written = 0
    for i, (tail_len, num_keep, kept) in enumerate(rows):
        for head in range(NUM_HEADS):
            sources = layout(num_keep, tail_len, kept[head])
            for place, source in enumerate(sources):
                block, offset = divmod(pool.slots[i, place].item(), block_size)
                assert pool.position[block, offset, head] == 100 + source
                assert pool.score[block, offset, head] == (100 + source) / 8
                written += 1
    assert (pool.position != -7).sum() == written
    assert (~pool.score.isnan()).sum() == written


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_at_most_the_dropped_count_moves_per_head(world):
    block_size, rows = world
    pool = Pool(block_size, rows)
    before = pool.kv.clone().nan_to_num()
    pool.fill(rows)
    moved = (pool.kv.nan_to_num() != before).any(-1).any(1)  # [num_blocks, block_size, num_heads]
    dropped = sum(tail_len - num_keep for tail_len, num_keep, _ in rows)
    assert moved.sum((0, 1)).max() <= dropped


def test_docstring_example():
    rows = [(6, 4, [{0, 2, 3, 5}, {0, 1, 2, 3}])]
    pool = Pool(1, rows)
    slots = pool.slots[0].tolist()
    pool.fill(rows)
    assert [pool.key_number(slots[place], 0) for place in range(4)] == [
        slots[source] * 10 for source in (0, 5, 2, 3)
    ]
    assert [pool.key_number(slots[place], 1) for place in range(4)] == [
        slots[place] * 10 + 1 for place in range(4)
    ]


def test_no_scores_leaves_the_score_pool_alone():
    rows = [(5, 3, [{2, 3, 4}, {0, 1, 4}])]
    pool = Pool(2, rows)
    pool.fill(rows, with_scores=False)
    assert pool.score.isnan().all()


def test_wrong_number_of_kept_slots_is_an_error():
    rows = [(5, 3, [{2, 3}, {0, 1, 4}])]
    with pytest.raises(AssertionError, match="movers for"):
        Pool(2, rows).fill(rows)
