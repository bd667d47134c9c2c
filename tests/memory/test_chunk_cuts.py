"""Halves of a step's chunks: together they are the whole, down to one token and one draw."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.runtime.chunk_cuts import halved_chunks, without_rows
from zipage_lang.runtime.step_plan import Chunk, PromptScore


@st.composite
def chunk_of(draw, row):
    num_tokens = draw(st.integers(1, 12))
    tokens = tuple(range(100 * row, 100 * row + num_tokens))
    is_known = num_tokens > 1 or draw(st.booleans())
    score = None
    if is_known and draw(st.booleans()):
        first = draw(st.integers(0, num_tokens - 1))
        count = draw(st.integers(1, num_tokens - first))
        score = PromptScore(first, tuple(range(first + 500, first + 500 + count)), 2)
    followers = draw(st.integers(0, 5))
    rows = (row, *range(1000 * (row + 1), 1000 * (row + 1) + followers))
    return Chunk(
        row=row,
        num_tokens=num_tokens,
        token_ids=tokens if is_known else None,
        position=draw(st.integers(0, 9)),
        resident_start=draw(st.integers(0, 9)),
        sample_rows=draw(st.sampled_from([(), rows])),
        query_slot=draw(st.sampled_from([None, row])),
        prompt_score=score,
    )


chunk_lists = st.integers(1, 4).flatmap(
    lambda count: st.tuples(*(chunk_of(row) for row in range(count)))
)


def leaves(chunks):
    halves = halved_chunks(chunks)
    return [leaf for half in halves for leaf in leaves(half)] if halves else [chunks]


def tokens_of(parts):
    """(row, position, slot, token) of every token that is computed, in order."""
    return [
        (c.row, c.position + j, c.resident_start + j, c.token_ids and c.token_ids[j], c.query_slot)
        for part in parts
        for c in part
        for j in range(c.num_tokens)
    ]


def scores_of(parts):
    """(row, position it follows, token) of every prompt token that is scored, in order."""
    return [
        (c.row, c.position + c.prompt_score.first + j, token)
        for part in parts
        for c in part
        if c.prompt_score is not None
        for j, token in enumerate(c.prompt_score.next_token_ids)
    ]


def draws_of(parts):
    """(row, position that it draws after)."""
    return [
        (row, c.position + c.num_tokens - 1)
        for part in parts
        for c in part
        for row in c.sample_rows
    ]


@given(chunk_lists)
def test_halves_compute_score_and_draw_what_the_whole_does(chunks):
    whole, parts = [chunks], leaves(chunks)
    assert list(dict.fromkeys(tokens_of(parts))) == tokens_of(whole)
    assert scores_of(parts) == scores_of(whole)
    assert sorted(draws_of(parts)) == sorted(draws_of(whole))


@given(chunk_lists)
def test_every_leaf_is_one_token_and_at_most_one_draw(chunks):
    for part in leaves(chunks):
        assert [chunk.num_tokens for chunk in part] == [1]
        assert len(part[0].sample_rows) <= 1


@given(chunk_lists)
def test_a_row_draws_last_of_all_that_draw_after_its_token(chunks):
    """Once it has drawn, its last token is another."""
    for chunk in chunks:
        rows = [
            row
            for part in leaves(chunks)
            for c in part
            if c.row == chunk.row
            for row in c.sample_rows
        ]
        assert chunk.row not in rows[:-1]


@given(chunk_lists)
def test_halves_are_as_equal_as_can_be(chunks):
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    if num_tokens > 1:
        first, second = halved_chunks(chunks)
        assert sum(chunk.num_tokens for chunk in first) == num_tokens // 2
        assert sum(chunk.num_tokens for chunk in second) == num_tokens - num_tokens // 2


def test_failed_rows_neither_compute_nor_draw():
    chunk = Chunk(0, 1, None, 5, 5, (0, 7, 8), None, None)
    other = msgspec.structs.replace(chunk, row=1, sample_rows=(1,))
    left = without_rows((chunk, other), {1, 7})
    assert left == (msgspec.structs.replace(chunk, sample_rows=(0, 8)),)
    assert without_rows((chunk, other), set()) == (chunk, other)
