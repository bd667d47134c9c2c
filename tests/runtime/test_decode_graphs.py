"""Which batch sizes run in graphs when memory ends before all are captured. No card needed: what a
capture is stands aside."""

import logging

import pytest
import torch

from zipage_lang.runtime.decode_graphs import DecodeGraphs, buckets_up_to
from zipage_lang.runtime.step_plan import Chunk


class LittleMemory(DecodeGraphs):
    """Captures nothing, and refuses batches larger or smaller than it has room for."""

    room = range(0, 1000)

    def _capture_padding(self, bucket, has_queries):
        if bucket not in self.room:
            raise torch.OutOfMemoryError(f"no room for {bucket}")
        return bucket


def decodes(count):
    return [
        Chunk(
            row=row,
            num_tokens=1,
            token_ids=None,
            position=0,
            resident_start=0,
            sample_rows=(row,),
            query_slot=None,
            prompt_score=None,
        )
        for row in range(count)
    ]


@pytest.fixture
def make_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))

    def make(room, max_rows=16):
        last_token_ids = torch.zeros(max_rows, dtype=torch.int64)
        graphs = LittleMemory(None, None, None, None, last_token_ids, max_rows=max_rows)
        graphs.room = room
        told = []
        graphs.warm_up(False, lambda done, total: told.append((done, total)))
        assert told[-1] == (len(buckets_up_to(max_rows)),) * 2
        return graphs

    return make


def test_with_memory_for_all_every_batch_may_run_and_nothing_is_said(make_graphs, caplog):
    graphs = make_graphs(range(1000))
    assert [count for count in range(18) if graphs.can_run(decodes(count))] == list(range(1, 17))
    assert not caplog.messages


def test_large_batches_without_memory_run_without_a_graph_after_one_warning(make_graphs, caplog):
    with caplog.at_level(logging.WARNING):
        graphs = make_graphs(range(5))
    assert [count for count in range(18) if graphs.can_run(decodes(count))] == [1, 2, 3, 4]
    assert len(caplog.messages) == 1
    assert "[8, 16]" in caplog.messages[0]
    assert "up to 4 still run in graphs" in caplog.messages[0]


def test_small_batches_without_memory_run_in_the_next_larger_graph(make_graphs, caplog):
    graphs = make_graphs(range(8, 17))
    assert all(graphs.can_run(decodes(count)) for count in range(1, 17))
    assert "[1, 2, 4]" in caplog.text


def test_with_memory_for_none_decoding_goes_on_without_graphs(make_graphs, caplog):
    graphs = make_graphs(range(0))
    assert not any(graphs.can_run(decodes(count)) for count in range(18))
    assert "decoding runs without graphs" in caplog.text
