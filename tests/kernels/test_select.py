"""Top K: exact counts, the highest scores, the newer of equals; whatever padding holds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.kernels.reference.select import protect_slots, select_top_k

# Few distinct values, so that ties are common; the last three are corner cases of the bit trick.
SCORES = st.sampled_from([-1.5, -0.0, 0.0, 1e-30, 0.25, 7.0, math.inf, -math.inf, math.nan])


@st.composite
def tails(draw):
    """[(scores of each head, positions of each head, num_keep)] of a few rows."""
    num_heads = draw(st.integers(1, 3))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        tail_len = draw(st.integers(1, 12))
        scores = [
            draw(st.lists(SCORES, min_size=tail_len, max_size=tail_len)) for _ in range(num_heads)
        ]
        positions = [draw(st.permutations(range(5, 5 + tail_len))) for _ in range(num_heads)]
        rows.append((scores, positions, draw(st.integers(1, tail_len))))
    return rows


def as_tensors(rows, padding_score):
    max_tail = max(len(scores[0]) for scores, _, _ in rows) + 2
    shape = (len(rows), len(rows[0][0]), max_tail)
    scores, positions = torch.full(shape, padding_score), torch.full(shape, 9, dtype=torch.int32)
    for i, (row_scores, row_positions, _) in enumerate(rows):
        scores[i, :, : len(row_scores[0])] = torch.tensor(row_scores)
        positions[i, :, : len(row_scores[0])] = torch.tensor(row_positions, dtype=torch.int32)
    lens = torch.tensor([len(row_scores[0]) for row_scores, _, _ in rows])
    return scores, positions, lens, torch.tensor([num_keep for _, _, num_keep in rows])


def best(scores, positions, num_keep):
    """The slow way: sort by score, then by position, newest first."""
    clean = [-math.inf if math.isnan(score) else score for score in scores]
    order = sorted(range(len(scores)), key=lambda i: (clean[i], positions[i]), reverse=True)
    return set(order[:num_keep])


@settings(max_examples=150, deadline=None)
@given(tails(), st.sampled_from([0.0, math.inf, math.nan]))
def test_keeps_exactly_the_best_and_the_newer_of_equals(rows, padding_score):
    keep = select_top_k(*as_tensors(rows, padding_score))
    for i, (scores, positions, num_keep) in enumerate(rows):
        for head in range(len(scores)):
            kept = set(keep[i, head].nonzero().flatten().tolist())
            assert kept == best(scores[head], positions[head], num_keep)


@pytest.mark.parametrize("tail_len", [2304, 5000])
def test_long_tails_of_equal_scores_keep_exactly_num_keep(tail_len):
    positions = torch.randperm(tail_len).int().expand(1, 2, tail_len)
    scores, lens = torch.zeros(1, 2, tail_len), torch.tensor([tail_len])
    keep = select_top_k(scores, positions, lens, torch.tensor([2048]))
    assert keep.sum(-1).tolist() == [[2048, 2048]]
    assert positions[0][keep[0]].min() == tail_len - 2048


def test_tiny_differences_decide():
    scores = torch.tensor([[[1.0, 1.0 + 2**-23, 1.0]]])
    positions = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    keep = select_top_k(scores, positions, torch.tensor([3]), torch.tensor([1]))
    assert keep.tolist() == [[[False, True, False]]]


def test_negative_scores_order_as_numbers():
    scores = torch.tensor([[[-3.0, -1.0, -2.0, -1e-40]]])
    positions = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    keep = select_top_k(scores, positions, torch.tensor([4]), torch.tensor([2]))
    assert keep.tolist() == [[[False, True, False, True]]]


def test_protects_newest_positions_and_oldest_slots_wherever_they_lie():
    positions = torch.tensor([[[7, 3, 9, 4, 8, 99]]], dtype=torch.int32)  # the last one is padding
    scores = torch.zeros(1, 1, 6)
    raised = protect_slots(
        scores, positions, torch.tensor([5]), torch.tensor([10]), num_recent=2, num_sinks=1
    )
    assert raised.isinf()[0, 0, :5].tolist() == [False, True, True, False, True]
    assert not scores.isinf().any()


def test_protects_nothing_when_nothing_is_asked_for():
    positions = torch.arange(5, dtype=torch.int32).view(1, 1, 5)
    lens = torch.tensor([5])
    raised = protect_slots(torch.zeros(1, 1, 5), positions, lens, lens, num_recent=0, num_sinks=0)
    assert not raised.isinf().any()


def test_more_sinks_than_slots_protects_every_slot():
    positions = torch.arange(5, dtype=torch.int32).view(1, 1, 5)
    lens = torch.tensor([3])
    raised = protect_slots(torch.zeros(1, 1, 5), positions, lens, lens, num_recent=0, num_sinks=9)
    assert raised.isinf()[0, 0, :3].all()


def test_rows_have_their_own_window():
    positions = torch.arange(4, dtype=torch.int32).expand(2, 1, 4)
    logical_lens = torch.tensor([4, 6])
    raised = protect_slots(
        torch.zeros(2, 1, 4), positions, torch.tensor([4, 4]), logical_lens, 3, 0
    )
    assert raised.isinf()[:, 0].tolist() == [[False, True, True, True], [False, False, False, True]]
