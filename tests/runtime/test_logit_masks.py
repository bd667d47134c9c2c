"""Masks on logits, and that unconstrained draws neither wait nor change."""

import random

import numpy as np
import pytest
import torch

from zipage_lang.runtime.constraint import Followers, Standing
from zipage_lang.runtime.draws import NO_TOKEN, Draws
from zipage_lang.runtime.logit_masks import MASKED_LINES, ConstrainedRows, mask_lines
from zipage_lang.runtime.token_bits import num_words, pack, unpack

CPU = torch.device("cpu")


class Allow:
    """Allows a fixed set of tokens, and remembers what it was told."""

    def __init__(self, token_ids, vocab_size, is_free=False):
        self.words = None if token_ids is None else pack(token_ids, vocab_size)
        self.is_free = is_free
        self.told = []
        self.standing = Standing()

    def fill(self, bits, index):
        if self.words is None:
            return False
        bits[index] = torch.from_numpy(self.words.copy())
        return True

    def accept(self, token_id):
        self.told.append(token_id)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 199, 4096])
def test_packed_sets_come_back(vocab_size):
    rng = random.Random(vocab_size)
    chosen = sorted(rng.sample(range(vocab_size), rng.randint(0, vocab_size)))
    words = pack([*chosen, vocab_size, vocab_size + 40], vocab_size)
    assert words.shape == (num_words(vocab_size),)
    assert unpack(words) == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [33, 199])
def test_masked_lines_keep_what_is_allowed_and_nothing_else(vocab_size, dtype):
    rng = np.random.default_rng(vocab_size)
    logits = torch.randn(5, vocab_size, dtype=dtype)
    before = logits.clone()
    allowed = rng.random((2, vocab_size)) < 0.3
    words = np.stack([pack(np.flatnonzero(line).tolist(), vocab_size) for line in allowed])
    mask_lines(logits, [3, 1], words)
    for line, kept in ((3, allowed[0]), (1, allowed[1])):
        expected = before[line].masked_fill(~torch.from_numpy(kept), float("-inf"))
        assert torch.equal(logits[line], expected)
    for line in (0, 2, 4):
        assert torch.equal(logits[line], before[line])


def test_rows_without_a_constraint_are_left_alone_and_nobody_is_waited_for():
    class Unready:
        followers = Followers({})

        def settle(self):
            raise AssertionError("waited for the device")

    rows, logits = ConstrainedRows(64, CPU), torch.zeros(2, 64)
    rows.set_up(0, Allow([1], 64))
    rows.set_up(5, None)
    rows.set_up(6, Allow([1], 64, is_free=True))
    rows.expect(Unready())
    assert rows.mask(logits, [5, 6]) is None
    assert torch.equal(logits, torch.zeros(2, 64))


def test_many_constrained_rows_are_masked_in_any_order():
    rows, num = ConstrainedRows(50, CPU), 2 * MASKED_LINES + 3
    order = list(range(num))
    random.Random(1).shuffle(order)
    for row in range(num):
        rows.set_up(row, Allow(None if row % 3 == 0 else [row % 50], 50))
    logits = torch.zeros(num, 50)
    followers = rows.mask(logits, order)
    assert len(followers.constraints) == num
    for line, row in enumerate(order):
        kept = torch.isfinite(logits[line]).nonzero().flatten().tolist()
        assert kept == (list(range(50)) if row % 3 == 0 else [row % 50])


def test_draws_are_told_once():
    constraint = Allow([1], 8)
    followers = Followers({2: constraint})
    told = [followers.tell([5, 6, 7], [1, 0, 0]) for _ in range(2)]
    assert told == [{2: Standing()}] * 2
    assert constraint.told == [7]


def test_a_broken_line_tells_its_constraints_cause_where_there_is_one():
    stuck, fine = Allow([], 8), Allow([1], 8)
    stuck.standing = Standing(error="nothing fits")
    drawn = torch.tensor([[5, 6], [1, 1]])
    draws = Draws((0, 3), drawn, (None, None), (), Followers({0: stuck, 1: fine}))
    assert [sample.error for sample in draws.samples()] == ["nothing fits", NO_TOKEN]


def test_a_line_that_drew_nothing_is_told_nothing():
    constraint = Allow([1], 8)
    assert Followers({1: constraint}).tell([5, 6], [0, 1]) == {1: Standing()}
    assert constraint.told == []
