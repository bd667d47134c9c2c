"""Which batch sizes run in graphs when memory ends before all are captured, and the numbers that a
step sends. No card needed: what a capture is stands aside."""

import logging
import random
import types

import msgspec
import numpy as np
import pytest
import torch

from zipage_lang.runtime.decode_graphs import DecodeGraphs, buckets_up_to
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.step_plan import BlockUpdate, Chunk, PromptScore


class LittleMemory(DecodeGraphs):
    """Captures nothing, and refuses batches larger or smaller than it has room for."""

    room = range(0, 1000)
    second_room = range(0, 1000)

    def _capture_padding(self, kind):
        if kind.bucket not in (self.second_room if kind.is_second else self.room):
            raise torch.OutOfMemoryError(f"no room for {kind}")
        return kind.bucket


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

    def make(room, max_rows=16, min_second=99, second_room=range(1000)):
        last_token_ids = torch.zeros(max_rows, dtype=torch.int64)
        planner = Planner(min_second)
        graphs = LittleMemory(None, None, None, planner, last_token_ids, max_rows=max_rows)
        graphs.room, graphs.second_room = room, second_room
        told = []
        graphs.warm_up(False, lambda done, total: told.append((done, total)))
        buckets = buckets_up_to(max_rows)
        num_captures = len(buckets) + sum(bucket >= min_second for bucket in buckets)
        assert told[-1] == (num_captures, num_captures)
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


def test_buckets_that_may_take_a_second_launch_have_a_second_graph(make_graphs, caplog):
    graphs = make_graphs(range(1000), min_second=8)
    assert set(graphs._captured) == {
        *((bucket, False, False) for bucket in (1, 2, 4, 8, 16)),
        *((bucket, False, True) for bucket in (8, 16)),
    }
    assert graphs.second_buckets == (8, 16)
    assert not caplog.messages


def replayed(graphs, monkeypatch, count):
    """Which capture a step of so many decodes replays."""
    seen = []
    for kind in list(graphs._captured):
        graph = types.SimpleNamespace(replay=lambda kind=kind: seen.append(kind))
        graphs._captured[kind] = types.SimpleNamespace(graph=graph, logits=torch.zeros(16, 2))
    monkeypatch.setattr(graphs, "_send_inputs", lambda *_: None)
    monkeypatch.setattr(
        graphs, "_tables", types.SimpleNamespace(of_rows=lambda rows: np.ones((len(rows), 1)))
    )
    graphs.run(decodes(count))
    return seen


def test_a_second_plan_replays_the_second_graph(make_graphs, monkeypatch):
    graphs = make_graphs(range(1000), min_second=8)
    assert replayed(graphs, monkeypatch, 4) == [(4, False, False)]
    assert replayed(graphs, monkeypatch, 7) == [(8, False, True)]


def test_a_bucket_without_memory_for_its_second_graph_runs_in_the_first(
    make_graphs, caplog, monkeypatch
):
    graphs = make_graphs(range(1000), min_second=4, second_room=range(5, 9))
    assert len(caplog.messages) == 1
    assert "faster for some steps, of batch sizes [4, 16]" in caplog.messages[0]
    assert replayed(graphs, monkeypatch, 3) == [(4, False, False)]
    assert replayed(graphs, monkeypatch, 5) == [(8, False, True)]
    assert replayed(graphs, monkeypatch, 16) == [(16, False, False)]


def with_queries(chunks):
    return [msgspec.structs.replace(chunk, query_slot=chunk.row) for chunk in chunks]


def test_a_late_capture_without_memory_is_wanted_no_more(make_graphs, caplog, monkeypatch):
    """The step is then run by a larger graph, or by none."""
    graphs = make_graphs(range(1000))
    replayed(graphs, monkeypatch, 2)
    monkeypatch.setattr(graphs, "_capture", refuse_capture)
    for bucket in (4, 8, 16):
        with pytest.raises(torch.OutOfMemoryError):
            graphs.run(with_queries(decodes(3)))
        assert f"[{bucket}]" in caplog.messages[-1]
    assert not graphs.can_run(with_queries(decodes(3)))
    assert graphs.can_run(decodes(2))


def test_without_memory_a_graph_that_writes_query_rings_serves_steps_that_do_not(
    make_graphs, caplog, monkeypatch
):
    graphs = make_graphs(range(1000))
    for kind in list(graphs._captured):
        graphs._captured[kind._replace(has_queries=True)] = graphs._captured.pop(kind)
    monkeypatch.setattr(graphs, "_capture", refuse_capture)
    assert replayed(graphs, monkeypatch, 3) == [(4, True, False)]
    assert replayed(graphs, monkeypatch, 3)[-1][:2] in [(4, True), (4, False)]
    assert not caplog.messages


def test_a_late_second_capture_without_memory_runs_in_the_first(make_graphs, caplog, monkeypatch):
    graphs = make_graphs(range(1000), min_second=8)
    graphs._captured = {kind: it for kind, it in graphs._captured.items() if not kind.is_second}
    replayed(graphs, monkeypatch, 2)
    monkeypatch.setattr(graphs, "_capture", refuse_capture)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(decodes(7))
    assert "faster for some steps, of batch sizes [8]" in caplog.text
    assert replayed(graphs, monkeypatch, 7) == [(8, False, False)]


def refuse_capture(*_):
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 2, "token_ids": (1, 2)},
        {"token_ids": (1,)},
        {"sample_rows": ()},
        {"sample_rows": (1, 2)},
        {"prompt_score": PromptScore(0, (1,), 0)},
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_step_with_anything_but_decodes_runs_without_a_graph(make_graphs, change, place):
    chunks = decodes(3)
    chunks[place] = msgspec.structs.replace(chunks[place], **change)
    assert not make_graphs(range(1000)).can_run(chunks)


class Planner:
    """Takes note of the batch that it is to plan, and takes the second launch where it may."""

    def __init__(self, min_second=99):
        self.min_second = min_second

    def has_second(self, bucket):
        return bucket >= self.min_second

    def plan(self, batch, bucket, *, may_be_second=True):
        self.batch, self.bucket = batch, bucket
        return types.SimpleNamespace(is_second=may_be_second and self.has_second(bucket))


@pytest.mark.parametrize("block_size", [1, 16])
def test_numbers_of_a_step_equal_the_loop_over_its_rows(monkeypatch, block_size):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind)
    )
    rng, window, planner = random.Random(block_size), 4, Planner()
    rows = rng.sample(range(16), 11)
    tables, cache = RowTables(16, 90), types.SimpleNamespace(block_size=block_size, window=window)
    chunks, block_ids = [], {}
    for row in rows:
        resident = rng.randrange(80)
        block_ids[row] = tuple(rng.sample(range(1, 999), resident // block_size + 1))
        tables.update(BlockUpdate(row, 0, block_ids[row]))
        slot = rng.choice([None, 0, 3])
        chunks.append(Chunk(row, 1, None, resident + 7, resident, (row,), slot, None))
    last_token_ids = torch.zeros(16, dtype=torch.int64)
    graphs = DecodeGraphs(None, cache, tables, planner, last_token_ids, max_rows=16)
    replayed = []
    graph = types.SimpleNamespace(replay=lambda: replayed.append(graphs._inputs.tolist()))
    graphs._captured[16, True, False] = types.SimpleNamespace(
        graph=graph, logits=torch.zeros(16, 2)
    )

    assert graphs.run(chunks).shape == (11, 2)

    ((sent_rows, positions, slots, ring_slots),) = replayed
    for line, chunk in enumerate(chunks):
        block, offset = divmod(chunk.resident_start, block_size)
        ring = None if chunk.query_slot is None else chunk.query_slot * window
        assert sent_rows[line] == chunk.row
        assert positions[line] == chunk.position
        assert slots[line] == block_ids[chunk.row][block] * block_size + offset
        assert ring_slots[line] == (-1 if ring is None else ring + chunk.position % window)
        assert planner.batch.kv_lens[line] == chunk.resident_start + 1
        table = planner.batch.block_tables[line, : len(block_ids[chunk.row])]
        assert tuple(table.tolist()) == block_ids[chunk.row]
    assert (planner.bucket, slots[11:], ring_slots[11:]) == (16, [-1] * 5, [-1] * 5)
    assert planner.batch.q_starts.tolist() == list(range(12))
