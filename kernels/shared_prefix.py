"""Which neighbouring decodes read the prefix they share together: a decision on block tables alone.

Knows nothing of queries, of how a launch is laid out, or of who filled the blocks.

A group's shared slots are read once per query tile instead of once per row. That pays where what is
not read outweighs what a grouped launch costs besides: a merge of two partial outputs, and work
items that start and end. Both are counted in the bytes that memory moves meanwhile.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from zipage_lang.kernels.flashinfer_module import DECODE_TILE_ROWS, ELEMENT_BYTES, Heads

# Seen on an H200, which moves 4.3 MB in a microsecond: what neighbours read again comes from the L2
# at a third of its price, and a grouped launch costs 14 to 19 us a layer more than our own decode
# attention. So it pays from about three times those bytes on (`benchmarks/card/shared_prefix.py`):
# for long prompts with many samples, for forks of a long thought. Decodes of other shapes, which
# FlashInfer attends to anyway, could be grouped from half of it on.
MERGE_BYTES = 224 * 2**20
# and 2 us on one of some 300 places for a work item of one KV head.
ITEM_BYTES = 32 * 2**10


class PrefixGroup(NamedTuple):
    """Rows [first_row, end_row) whose tables begin with the same `num_blocks` full blocks."""

    first_row: int
    end_row: int
    num_blocks: int
    saved_bytes: int  # of one layer, that need not be read; less what its work items cost

    def num_tiles(self, heads: Heads) -> int:
        """Work items per KV head."""
        return num_tiles(self.end_row - self.first_row, heads)


def num_tiles(num_rows: int, heads: Heads) -> int:
    """Query tiles of so many rows: the query heads of one KV head lie side by side in a tile."""
    return -(-num_rows * (heads.num_q_heads // heads.num_kv_heads) // DECODE_TILE_ROWS)


def worthwhile_groups(shared: np.ndarray, heads: Heads, max_tiles: int) -> list[PrefixGroup]:
    """Disjoint groups, in the order of their rows; none where they would not pay for the merge.

    Args:
        shared: int64 [num_rows - 1], from `shared_blocks`.
        max_tiles: of all groups together; what saves least is left out.
    """
    if not shared.any():
        return []
    groups = _fitting(best_groups(shared, heads), heads, max_tiles)
    return groups if sum(group.saved_bytes for group in groups) > MERGE_BYTES else []


def shared_blocks(tables: np.ndarray, kv_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Leading blocks that each row and the next one share, int64 [num_rows - 1].

    Full blocks only, and never a row's newest slot: each row keeps at least that one to itself.

    Args:
        tables: int32 [num_rows, max_blocks]; rows that share a prefix stand side by side.
        kv_lens: int32 [num_rows], at least 1.
    """
    full = (kv_lens - 1) // block_size  # [num_rows]
    most = np.minimum(full[1:], full[:-1])  # [num_rows - 1]
    shared = np.zeros(len(most), dtype=np.int64)
    pairs = np.flatnonzero((tables[1:, 0] == tables[:-1, 0]) & (most > 0))
    if len(pairs) == 0:
        return shared
    width = int(most[pairs].max())
    starts = tables[:, :width]
    differs = starts[pairs + 1] != starts[pairs]  # [num_pairs, width]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), width)  # [num_pairs]
    shared[pairs] = np.minimum(first, most[pairs])
    return shared


@dataclasses.dataclass(slots=True)
class _Run:
    """Neighbours from first_row on that share num_blocks; the best groups within, so far."""

    num_blocks: int
    first_row: int
    saved_bytes: int = 0
    groups: list[PrefixGroup] = dataclasses.field(default_factory=list)

    def take(self, groups: list[PrefixGroup], saved_bytes: int) -> None:
        self.groups += groups
        self.saved_bytes += saved_bytes


def best_groups(shared: np.ndarray, heads: Heads) -> list[PrefixGroup]:
    """The groups that save most, where a row may be in one group only.

    Runs of rows that share at least so many blocks lie within one another like brackets. Going
    through the rows, a run closes where its neighbours share less; by then the best of what lies
    within is known, and the run as one group is taken if that saves more.

    Args:
        shared: int64 [num_rows - 1], from `shared_blocks`.
    """
    open_runs = [_Run(0, 0)]
    changes = np.flatnonzero(np.diff(shared, prepend=0, append=0))
    levels = np.append(shared, 0)[changes]
    for row, level in zip(changes.tolist(), levels.tolist(), strict=True):
        opened = _Run(level, row)
        while open_runs[-1].num_blocks > level:
            closed = open_runs.pop()
            opened.first_row = closed.first_row
            is_within_last = open_runs[-1].num_blocks >= level
            heir = open_runs[-1] if is_within_last else opened
            heir.take(*_best_of(closed, row + 1, heads))
        if open_runs[-1].num_blocks < level:
            open_runs.append(opened)
    return open_runs[0].groups


def _best_of(run: _Run, end_row: int, heads: Heads) -> tuple[list[PrefixGroup], int]:
    """The run as one group, or the groups within it."""
    num_rows = end_row - run.first_row
    tiles = num_tiles(num_rows, heads)
    slot_bytes = 2 * heads.num_kv_heads * heads.head_dim * ELEMENT_BYTES  # K and V
    saved = (num_rows - tiles) * run.num_blocks * heads.block_size * slot_bytes
    saved -= tiles * heads.num_kv_heads * ITEM_BYTES
    if saved <= run.saved_bytes:
        return run.groups, run.saved_bytes
    return [PrefixGroup(run.first_row, end_row, run.num_blocks, saved)], saved


def _fitting(groups: list[PrefixGroup], heads: Heads, max_tiles: int) -> list[PrefixGroup]:
    """Those that save most and together have no more tiles."""
    if sum(group.num_tiles(heads) for group in groups) <= max_tiles:
        return groups
    kept, room = [], max_tiles
    for group in sorted(groups, key=lambda group: -group.saved_bytes):
        if group.num_tiles(heads) <= room:
            kept.append(group)
            room -= group.num_tiles(heads)
    return sorted(kept)
