"""The Triton selection against its twin: equal to the bit, ties and odd scores included."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import select
from zipage_lang.kernels.reference import select as reference

SMALL = [(40, 23, 1), (300, 16, 77)]
LARGE = pytest.param((2304, 5000, 1999), marks=pytest.mark.gpu)


def tails(tail_lens, device, num_heads=2):
    """Scores with ties, both zeros, infinities and NaN; positions in no order; garbage padding."""
    generator = torch.Generator().manual_seed(sum(tail_lens))
    shape = (len(tail_lens), num_heads, max(tail_lens))
    scores = torch.randn(shape, generator=generator)
    scores[..., ::4] = 0.25
    odd = torch.tensor([0.0, -0.0, 1e-40, math.inf, -math.inf, math.nan, -1e30])
    drawn = torch.randint(len(odd), shape, generator=generator)
    is_odd = torch.rand(shape, generator=generator) < 0.2
    scores = torch.where(is_odd, odd[drawn], scores)
    positions = torch.rand(shape, generator=generator).argsort(-1).int() + 5
    return scores.to(device), positions.to(device), torch.tensor(tail_lens, device=device)


def check(found, expected, lens):
    assert found.dtype == expected.dtype
    for row, tail_len in enumerate(lens.tolist()):
        torch.testing.assert_close(
            found[row, :, :tail_len], expected[row, :, :tail_len], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("tail_lens", [*SMALL, LARGE])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_select_top_k_equals_its_twin(device, tail_lens, share):
    scores, positions, lens = tails(tail_lens, device)
    num_keep = (lens * share).long().clamp(min=1)
    keep = select.select_top_k(scores, positions, lens, num_keep)
    check(keep, reference.select_top_k(scores, positions, lens, num_keep), lens)
    assert torch.equal(keep.sum(-1), num_keep[:, None].expand(-1, keep.shape[1]))


def test_slots_past_a_tail_are_never_kept(device):
    scores, positions, lens = tails((30, 7), device)
    scores[1, :, 7:] = math.inf
    keep = select.select_top_k(scores, positions, lens, lens)
    assert not keep[1, :, 7:].any()
    assert keep[1, :, :7].all()


def test_equal_scores_keep_the_newest(device):
    _, positions, lens = tails((50,), device)
    scores = torch.full(positions.shape, -2.0, device=device)
    keep = select.select_top_k(scores, positions, lens, torch.tensor([20], device=device))
    assert torch.equal(keep, positions >= 5 + 50 - 20)


@pytest.mark.parametrize("tail_lens", [*SMALL, LARGE])
@pytest.mark.parametrize(("num_recent", "num_sinks"), [(0, 0), (1, 1), (16, 4), (0, 9)])
def test_protect_slots_equals_its_twin(device, tail_lens, num_recent, num_sinks):
    scores, positions, lens = tails(tail_lens, device)
    logical_lens = positions.flatten(1).amax(-1).long() - 2
    args = (scores, positions, lens, logical_lens, num_recent, num_sinks)
    check(select.protect_slots(*args), reference.protect_slots(*args), lens)


@pytest.mark.gpu
def test_selection_never_waits_for_the_device(device):
    scores, positions, lens = tails((300, 77), device)
    num_keep = lens // 2
    try:
        torch.cuda.set_sync_debug_mode("error")
        raised = select.protect_slots(scores, positions, lens, lens, 16, 4)
        select.select_top_k(raised, positions, lens, num_keep)
    finally:
        torch.cuda.set_sync_debug_mode("default")
