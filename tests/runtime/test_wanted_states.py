"""Wanted states and where each is found again, against a loop over all tokens of drawn steps."""

import types

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.batch_builder import BatchBuilder
from zipage_lang.runtime.chunk_cuts import halved_chunks, without_rows
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.step_plan import BlockUpdate, Chunk, PromptScore
from zipage_lang.runtime.wanted_states import wanted_of, wanted_tokens

BLOCK_SIZE = 2


@st.composite
def chunks_of_a_step(draw):
    chunks = []
    for row in range(draw(st.integers(1, 5))):
        num_tokens = draw(st.integers(1, 9))
        score = None
        if draw(st.booleans()):
            first = draw(st.integers(0, num_tokens - 1))
            num_scored = draw(st.integers(1, num_tokens - first))
            score = PromptScore(first, (3,) * num_scored, 0)
        rows = (row,) if draw(st.booleans()) else ()
        chunks.append(Chunk(row, num_tokens, (7,) * num_tokens, 0, 0, rows, None, score))
    return chunks


def is_wanted(chunk, place):
    score = chunk.prompt_score
    is_scored = score is not None and 0 <= place - score.first < len(score.next_token_ids)
    return is_scored or (bool(chunk.sample_rows) and place == chunk.num_tokens - 1)


@given(chunks_of_a_step())
def test_what_is_read_is_wanted_and_nothing_else(chunks):
    tokens = [(chunk, place) for chunk in chunks for place in range(chunk.num_tokens)]
    expected = [index for index, token in enumerate(tokens) if is_wanted(*token)]
    starts = np.cumsum([0, *(chunk.num_tokens for chunk in chunks)])
    assert wanted_tokens(chunks, starts).tolist() == expected
    for chunk in chunks:
        if chunk.prompt_score is not None:  # so a reader finds them at the front of its chunk's
            score = chunk.prompt_score
            scored = range(score.first, score.first + len(score.next_token_ids))
            assert wanted_of(chunk)[: len(scored)] == tuple(scored)


@given(chunks_of_a_step())
def test_a_batch_wants_its_draws_found_among_what_comes_back(chunks):
    shape = types.SimpleNamespace(num_q_heads=2, num_kv_heads=1, head_dim=8)
    cache = types.SimpleNamespace(shape=shape, block_size=BLOCK_SIZE, window=4)
    tables = RowTables(len(chunks), 10)
    for chunk in chunks:
        tables.update(BlockUpdate(chunk.row, 0, tuple(range(1, 6))))
    builder = BatchBuilder(cache, choose_backend("cpu"), tables)
    batch = builder.build(chunks, torch.zeros(len(chunks), dtype=torch.int64))
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    wanted = torch.arange(num_tokens) if batch.wanted is None else batch.wanted
    ends = torch.tensor([chunk.num_tokens for chunk in chunks]).cumsum(0) - 1
    drawing = [bool(chunk.sample_rows) for chunk in chunks]
    assert wanted[batch.logits_index].tolist() == ends[drawing].tolist()
    assert batch.wanted is None or len(batch.wanted) < num_tokens


def places_wanted(chunks):
    """(row, position) of every token whose state is read."""
    return {(chunk.row, chunk.position + place) for chunk in chunks for place in wanted_of(chunk)}


@given(chunks_of_a_step(), st.data())
def test_a_step_cut_in_parts_reads_the_same_states(chunks, data):
    lost = data.draw(st.sets(st.integers(0, 4), max_size=2))
    parts = [without_rows(tuple(chunks), lost)]
    kept = places_wanted(chunk for chunk in chunks if chunk.row not in lost)
    for _ in range(data.draw(st.integers(0, 4))):
        parts = [half for part in parts for half in (part and halved_chunks(part)) or (part,)]
        assert set().union(*map(places_wanted, parts)) == kept
