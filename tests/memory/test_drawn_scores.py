"""A draw moves all rows on or none; behind it, scores and counts come in smaller parts."""

import pytest
import torch
from test_support.refusals import Refusals, RefusedMemory

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.out_of_memory import Retries
from zipage_lang.runtime.sampler import Sampler
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import RowSetup

VOCAB, ROWS = 50, 6


class LittleMemory:
    """A backend whose `score_tokens` takes at most so many lines, and never some rows' logits."""

    def __init__(self, max_lines=1000, never=()):
        self._backend, self._max_lines, self._never = choose_backend("cpu"), max_lines, never

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def score_tokens(self, logits, token_ids, num_top):
        unlucky = any(bool((logits[:, 0] == mark).any()) for mark in self._never)
        if len(logits) > self._max_lines or unlucky:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return self._backend.score_tokens(logits, token_ids, num_top)


def logits():
    """Line i begins with i."""
    lines = torch.randn((ROWS, VOCAB), generator=torch.Generator().manual_seed(3))
    lines[:, 0] = torch.arange(ROWS)
    return lines


def drawn(backend, retries=None):
    """One draw of all rows, of which every second wants log-probabilities and all are penalised."""
    sampler = make_sampler(backend, retries)
    return sampler.draw(logits(), range(ROWS)).samples(), sampler


def make_sampler(backend, retries=None):
    sampler = Sampler(
        max_rows=ROWS,
        vocab_size=VOCAB,
        eos_token_ids=[],
        backend=backend,
        device=torch.device("cpu"),
        retries=retries,
    )
    for row in range(ROWS):
        sampling = SamplingParams(
            temperature=1.0, logprobs=row if row % 2 else None, presence_penalty=0.5
        )
        sampler.set_up_row(RowSetup(row, (1, 2), 2, sampling, seed=row))
    return sampler


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_refusal_anywhere_in_a_draw_leaves_all_rows_where_they_were(deterministic):
    """Refused one by one: the next call draws what the first would have."""
    backend = choose_backend("cpu", deterministic=deterministic)
    expected, _ = drawn(backend)
    num_raised = 0
    for number in range(1000):
        refusals = Refusals(numbers=lambda asked, number=number: asked == number)
        sampler = make_sampler(backend, Retries())
        try:
            with RefusedMemory(refusals):
                found = sampler.draw(logits(), range(ROWS))
        except RuntimeError:
            num_raised += 1
            assert sampler._num_generated.tolist() == [0] * ROWS
            assert sampler.last_token_ids.tolist() == [2] * ROWS
            found = sampler.draw(logits(), range(ROWS))
        assert found.samples() == expected
        if refusals.num_refused == 0:
            break
    assert num_raised > 20
    assert number < 999


@pytest.mark.parametrize("count", [3, 5, 8, 10**6])
def test_refusals_in_a_row_move_all_rows_on_or_none(count):
    """However many from anywhere on: behind the draw nothing raises, lines have errors."""
    expected, _ = drawn(choose_backend("cpu"))
    num_raised = num_with_errors = 0
    for first in range(1000):
        refusals = Refusals(numbers=range(first, first + count).__contains__)
        sampler = make_sampler(choose_backend("cpu"), Retries())
        try:
            with RefusedMemory(refusals):
                found = sampler.draw(logits(), range(ROWS)).samples()
        except RuntimeError:
            num_raised += 1
            assert sampler._num_generated.tolist() == [0] * ROWS
            continue
        assert sampler._num_generated.tolist() == [1] * ROWS
        for sample, wanted in zip(found, expected, strict=True):
            assert sample.token_id == wanted.token_id
            assert sample == wanted or "out of memory" in sample.error
        num_with_errors += any(sample.error for sample in found)
        if refusals.num_refused == 0:
            break
    assert num_raised > 0
    assert num_with_errors > 0
    assert first < 999


@pytest.mark.parametrize("max_lines", [1, 2])
def test_scores_in_parts_equal_scores_at_once(max_lines):
    retries = Retries()
    expected, _ = drawn(choose_backend("cpu"))
    found, _ = drawn(LittleMemory(max_lines), retries)
    assert found == expected
    assert retries.num_refusals > 0


def test_a_line_that_finds_no_memory_has_an_error_and_the_others_their_scores():
    expected, _ = drawn(choose_backend("cpu"))
    found, _ = drawn(LittleMemory(never=[3]))
    assert "out of memory" in found[3].error
    assert [*found[:3], *found[4:]] == [*expected[:3], *expected[4:]]


def test_no_row_draws_twice_however_often_its_scores_are_tried():
    _, sampler = drawn(LittleMemory(max_lines=1))
    assert sampler._num_generated.tolist() == [1] * ROWS
    counts = sampler._counts
    assert [int(counts.generated[counts.slots[row]].sum()) for row in range(ROWS)] == [1] * ROWS
