"""A picture of pool, tree and requests at one moment, as it is sent to people who watch.

Bounded: what does not fit is counted and left out. It has no token, no text and no request id, so
whoever may see it learns lengths and counts only. Knows nothing of how it is made or drawn.
"""

import msgspec

MAX_COMPACTIONS = 256  # the newest; older ones are in the counts only


class BlockGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Who the pool's blocks serve (radix_cache.census.Owner)."""

    block_size: int
    num_blocks: int
    num_by_owner: list[int]  # exact, of all blocks; index is the Owner
    stride: int  # every how manyeth block is in `cells`
    cells: bytes  # an Owner per block 1, 1 + stride, ...


class NodeView(msgspec.Struct, frozen=True, array_like=True):
    """A node of the radix tree. Parents come before what hangs below them."""

    serial: int
    parent: int  # its serial; 0 for a root
    is_atomic: bool  # a compacted state
    num_tokens: int  # logical tokens it stands for
    num_blocks: int
    num_hits: int  # lookups that took it
    num_locks: int  # open tables that go on from here or below
    num_left_out: int  # children that are not in the picture


class RequestView(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a request that runs, waits or is held. Lengths in tokens or slots."""

    arrival: int  # with sample_index: its name in this engine
    sample_index: int
    status: str  # waiting, swapped, running, compacting, held
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    end_len: int  # tokens at which it ends by count
    logical_len: int
    resident_len: int
    protected_len: int
    mode: str
    policy: str
    budget: int
    interval: int
    compactions: int
    dropped: int
    last_compaction_at: int  # logical length at the last compaction


class CompactionView(msgspec.Struct, frozen=True, array_like=True):
    """One compaction that is done."""

    number: int  # counted from 1 since the engine's start
    arrival: int
    sample_index: int
    logical_len: int
    resident_before: int
    resident_after: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, taken between two steps."""

    step: int
    taken_s: float  # what taking it cost the engine
    stats: dict[str, int | float | str]
    grid: BlockGrid
    nodes: list[NodeView]
    num_nodes: int
    requests: list[RequestView]
    num_requests: int
    logical_len: int  # of all requests together
    resident_len: int
    compactions: list[CompactionView]  # the newest of all, oldest first
