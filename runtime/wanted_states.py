"""Which tokens of a step have their final state read: those that draw or whose next is scored.

Knows nothing of models or of what is made of the states.
"""

from collections.abc import Sequence

import numpy as np

from zipage_lang.runtime.step_plan import Chunk


def wanted_of(chunk: Chunk) -> tuple[int, ...]:
    """Places in the chunk, ascending; those of its `prompt_score` come first."""
    score, last = chunk.prompt_score, chunk.num_tokens - 1
    scored = () if score is None else range(score.first, score.first + len(score.next_token_ids))
    is_apart = bool(chunk.sample_rows) and last not in scored
    return (*scored, last) if is_apart else tuple(scored)


def wanted_tokens(chunks: Sequence[Chunk], starts: np.ndarray) -> np.ndarray:
    """int64 [num_wanted], ascending, into the step's tokens.

    starts: int64 [num_chunks + 1], where each chunk's tokens begin.
    """
    places = [
        start + place
        for chunk, start in zip(chunks, starts[:-1], strict=True)
        for place in wanted_of(chunk)
    ]
    return np.array(places, dtype=np.int64)
