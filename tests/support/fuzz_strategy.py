"""Inputs for the fuzzing targets, drawn by hypothesis: kept ones with a few runs changed, and any.

Knows nothing of the targets.
"""

from collections.abc import Sequence

from hypothesis import strategies as st

MAX_LEN = 400


def inputs(kept: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes of which many are close to one of the kept inputs."""
    fresh = st.binary(max_size=MAX_LEN)
    if not kept:
        return fresh
    return (
        fresh
        | st.builds(_spliced, st.sampled_from(kept), _changes)
        | st.builds(_joined, st.sampled_from(kept), st.sampled_from(kept), st.integers(0, MAX_LEN))
    )


_changes = st.lists(
    st.tuples(st.integers(0, MAX_LEN), st.integers(0, 8), st.binary(max_size=8)), max_size=4
)


def _spliced(data: bytes, changes: Sequence[tuple[int, int, bytes]]) -> bytes:
    for place, num_cut, added in changes:
        at = place % (len(data) + 1)
        data = data[:at] + added + data[at + num_cut :]
    return data


def _joined(head: bytes, tail: bytes, place: int) -> bytes:
    return head[: place % (len(head) + 1)] + tail[place % (len(tail) + 1) :]
