"""Cuts the chunks of a step in halves, down to one token that one row draws after.

What the parts compute, run one after the other, is what the whole would have. Knows nothing of why
they are cut.
"""

from collections.abc import Collection, Sequence

import msgspec

from zipage_lang.runtime.step_plan import Chunk, PromptScore

Chunks = tuple[Chunk, ...]


def halved_chunks(chunks: Chunks) -> Sequence[Chunks]:
    """Two parts with half of the tokens each, in order; none where nothing is left to cut.

    A chunk across the middle is cut too. Of one token, the rows that draw after it are halved:
    then both parts compute the token.
    """
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    if num_tokens == 1:
        return _halved_draws(chunks[0])
    first: list[Chunk] = []
    second: list[Chunk] = []
    room = num_tokens // 2
    for chunk in chunks:
        if chunk.num_tokens <= room:
            first.append(chunk)
        elif room == 0:
            second.append(chunk)
        else:
            head, tail = _cut(chunk, room)
            first.append(head)
            second.append(tail)
        room = max(0, room - chunk.num_tokens)
    return tuple(first), tuple(second)


def without_rows(chunks: Chunks, rows: Collection[int]) -> Chunks:
    """The chunks of other rows, with none of `rows` among those that draw."""
    if not rows:
        return chunks
    return tuple(
        msgspec.structs.replace(
            chunk, sample_rows=tuple(row for row in chunk.sample_rows if row not in rows)
        )
        for chunk in chunks
        if chunk.row not in rows
    )


def _halved_draws(chunk: Chunk) -> Sequence[Chunks]:
    """The chunk's own row comes first among those that draw, and is left to the last part: once it
    has drawn, its last token is another."""
    middle = (len(chunk.sample_rows) + 1) // 2
    first, second = chunk.sample_rows[middle:], chunk.sample_rows[:middle]
    if not first:
        return ()
    replace = msgspec.structs.replace
    return (
        (replace(chunk, sample_rows=first, prompt_score=None),),
        (replace(chunk, sample_rows=second),),
    )


def _cut(chunk: Chunk, num_first: int) -> tuple[Chunk, Chunk]:
    assert chunk.token_ids is not None, f"{chunk.num_tokens} tokens that nobody knows"
    first_score, second_score = _cut_score(chunk.prompt_score, num_first)
    head = msgspec.structs.replace(
        chunk,
        num_tokens=num_first,
        token_ids=chunk.token_ids[:num_first],
        sample_rows=(),
        prompt_score=first_score,
    )
    tail = msgspec.structs.replace(
        chunk,
        num_tokens=chunk.num_tokens - num_first,
        token_ids=chunk.token_ids[num_first:],
        position=chunk.position + num_first,
        resident_start=chunk.resident_start + num_first,
        prompt_score=second_score,
    )
    return head, tail


def _cut_score(
    score: PromptScore | None, num_first: int
) -> tuple[PromptScore | None, PromptScore | None]:
    if score is None:
        return None, None
    ahead = min(max(0, num_first - score.first), len(score.next_token_ids))
    head, tail = score.next_token_ids[:ahead], score.next_token_ids[ahead:]
    return (
        PromptScore(score.first, head, score.num_top) if head else None,
        PromptScore(max(0, score.first - num_first), tail, score.num_top) if tail else None,
    )
