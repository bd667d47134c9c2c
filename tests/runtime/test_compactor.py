"""When compactions count as done: few at once, many when they are."""

import pytest
import torch

from zipage_lang.runtime import compactor as compactor_module
from zipage_lang.runtime.compactor import MAX_AWAITED, Compactor
from zipage_lang.runtime.step_plan import Compaction


class Compressor:
    """Moves nothing."""

    def run(self, compactions):
        return frozenset()


def compactions(idents):
    return tuple(
        Compaction(
            ident=ident,
            row=ident,
            policy="random",
            protected_len=0,
            tail_len=8,
            num_keep=4,
            stateful_len=0,
            logical_len=8,
            query_slot=None,
            num_queries=0,
            seed=0,
            block_ids_before=(1, 2),
            block_ids=(1,),
            block_copies=(),
        )
        for ident in idents
    )


@pytest.fixture
def beside():
    return Compactor(Compressor(), torch.device("cpu"))


def test_few_count_as_done_at_once_and_are_told_once(beside):
    beside.launch(compactions(range(MAX_AWAITED)))
    assert beside.go_on_behind() == tuple(range(MAX_AWAITED))
    assert beside.go_on_behind() == ()
    assert beside.take_done() == ()


def test_many_are_told_when_they_are_done(beside):
    idents = tuple(range(MAX_AWAITED + 1))
    beside.launch(compactions(idents))
    assert beside.go_on_behind() == ()
    assert beside.take_done() == idents


def test_nobody_goes_on_behind_few_that_have_many_ahead_of_them(beside, monkeypatch):
    many, few = tuple(range(MAX_AWAITED + 1)), (100,)
    over = set()
    monkeypatch.setattr(compactor_module, "_is_done", lambda batch: over.issuperset(batch.idents))
    beside.launch(compactions(many))
    beside.launch(compactions(few))
    assert beside.go_on_behind() == ()
    over.update(many)
    assert beside.take_done() == many
    assert beside.go_on_behind() == few


def test_nothing_was_launched(beside):
    assert beside.go_on_behind() == beside.take_done() == beside.wait() == ()


@pytest.mark.gpu
def test_what_is_launched_afterwards_runs_behind_them():
    """A slow compaction writes; the next kernel on the current stream must see it."""
    value = torch.zeros(1, device="cuda")

    class Slow:
        def run(self, compactions):
            torch.cuda._sleep(50_000_000)
            value.fill_(1.0)
            return frozenset()

    beside = Compactor(Slow(), torch.device("cuda"))
    beside.launch(compactions([0]))
    seen_before = value.clone()
    assert beside.go_on_behind() == (0,)
    seen_behind = value.clone()
    assert beside.wait() == ()
    assert (seen_before.item(), seen_behind.item()) == (0.0, 1.0)
    assert beside.clock.busy_s > 0
