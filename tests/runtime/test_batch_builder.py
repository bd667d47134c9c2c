"""Ring entries of a step's tokens, from the chunks of its plan, against a loop over them."""

import types

import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.batch_builder import BatchBuilder
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.step_plan import BlockUpdate, Chunk

WINDOW, BLOCK_SIZE = 4, 2


def built(lens, query_slots):
    """The batch of chunks of these lengths, chunk i at position 3 * i."""
    shape = types.SimpleNamespace(num_q_heads=2, num_kv_heads=1, head_dim=8)
    cache = types.SimpleNamespace(shape=shape, block_size=BLOCK_SIZE, window=WINDOW)
    tables, chunks = RowTables(len(lens), 40), []
    for row, (num_tokens, query_slot) in enumerate(zip(lens, query_slots, strict=True)):
        start = 3 * row
        tables.update(BlockUpdate(row, 0, tuple(range(1, 2 + (start + num_tokens) // BLOCK_SIZE))))
        ids = (7,) * num_tokens
        chunks.append(Chunk(row, num_tokens, ids, start, start, (row,), query_slot, None))
    builder = BatchBuilder(cache, choose_backend("cpu"), tables)
    return builder.build(chunks, torch.zeros(len(lens), dtype=torch.int64))


@pytest.mark.parametrize(
    ("lens", "query_slots"),
    [([1, 1, 1], [2, None, 0]), ([1, 9, 3], [1, 0, None]), ([4, 5, 2, 1], [None, 3, 0, 1])],
)
def test_the_last_tokens_of_chunks_with_a_query_slot_get_ring_entries(lens, query_slots):
    wanted = []
    for row, (num_tokens, query_slot) in enumerate(zip(lens, query_slots, strict=True)):
        for token in range(num_tokens):
            is_kept = query_slot is not None and token >= num_tokens - WINDOW
            entry = (3 * row + token) % WINDOW
            wanted.append(query_slot * WINDOW + entry if is_kept else -1)
    batch = built(lens, query_slots)
    assert batch.ring_slots.tolist() == wanted
    kept = batch.ring_slots[batch.ring_slots >= 0]
    assert len(kept.unique()) == len(kept)


def test_a_step_without_query_slots_keeps_no_queries():
    assert built([1, 6], [None, None]).ring_slots is None
