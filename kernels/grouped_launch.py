"""One launch over each row's own slots and over the prefixes that groups of rows share.

Knows nothing of which rows are worth grouping, nor of where its numbers are sent.

FlashInfer's kernel goes through a list of work items: an entry (queries, slots, where its output
lies) and a tile of the entry's queries. Its own planner can't fix the number of items without
splitting all sequences, so the list is written here. A bucket's launch always has the same entries,
items and places, whatever the step: a graph may hold it.

Entries, for `num_rows` rows and up to `max_tiles` groups:
    0 .. num_rows - 1            a row's own slots; output row i
    num_rows + 1 + 2 * j         group j's shared slots; output rows num_rows + (its rows)
    the others up to the last    gaps: an entry's queries end where the next entry's begin, and
                                 groups may begin anywhere; no item names them
    the last                     empty: no query and no slot; items that a step does not need
                                 name it, and the kernel reads and writes nothing for them
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from zipage_lang.kernels.flashinfer_module import (
    DECODE_TILE_ROWS,
    Heads,
    LaunchPlan,
    SequenceIndex,
    unsplit_launch,
)
from zipage_lang.kernels.shared_prefix import PrefixGroup, num_tiles

# A sequence that is not split is one chunk: any number above all lengths. Only divided by.
_CHUNK_LEN = 2**30

Array = TypeVar("Array", Tensor, np.ndarray)


class GroupedArrays(NamedTuple, Generic[Array]):
    """The launch's numbers within one int32 buffer: tensors, or numpy arrays on the host."""

    q_starts: Array  # [num_entries + 1]
    block_starts: Array  # [num_entries + 1], into block_ids
    last_block_lens: Array  # [num_entries]
    out_starts: Array  # [num_entries + 1], first output row of each entry
    item_entries: Array  # [num_items]
    item_tiles: Array  # [num_items], which tile of the entry's queries
    item_chunks: Array  # [num_items], all 0: nothing is split
    chunk_len: Array  # [1]
    has_shared: Array  # [num_rows], 1 where a row's shared part has an output of its own
    block_ids: Array  # [block_starts[-1]]


def sequences_of(arrays: GroupedArrays[Tensor]) -> SequenceIndex:
    """What a launch is told besides its workspace."""
    return SequenceIndex(
        arrays.q_starts, arrays.block_starts, arrays.last_block_lens, arrays.block_ids
    )


class GroupedLayout:
    """Where the numbers of a bucket's grouped launch lie; depends on the bucket alone."""

    def __init__(self, num_rows: int, heads: Heads) -> None:
        """num_rows: the bucket; heads: at most 16 query heads for each KV head."""
        group_size = heads.num_q_heads // heads.num_kv_heads
        assert group_size <= DECODE_TILE_ROWS, f"{heads}: a row does not fit one tile"
        self.num_rows, self._heads = num_rows, heads
        # Whole groups in full tiles, and a tile begun by every eighth row.
        self.max_tiles = num_tiles(num_rows, heads) + num_rows // 8
        self._num_entries = num_rows + 2 * self.max_tiles + 2
        self._num_items = num_rows + self.max_tiles

    @property
    def num_fixed(self) -> int:
        """int32 numbers before the block ids."""
        return sum(self._sizes)

    @property
    def launch(self) -> LaunchPlan:
        """Its work items are in the same buffer as everything else."""
        places = dict(
            zip(GroupedArrays._fields, np.cumsum((0, *self._sizes)).tolist(), strict=True)
        )
        return unsplit_launch(
            num_items=self._num_items,
            num_rows=self.num_rows,
            item_entries=places["item_entries"],
            item_tiles=places["item_tiles"],
            item_chunks=places["item_chunks"],
            out_starts=places["out_starts"],
            chunk_len=places["chunk_len"],
        )

    def arrays(self, numbers: Tensor, num_blocks: int) -> GroupedArrays[Tensor]:
        """Views into a buffer of int32 numbers, with so many block ids at its end."""
        sizes = (*self._sizes, num_blocks)
        return GroupedArrays(*numbers[: sum(sizes)].split(sizes))

    def num_blocks(self, kv_lens: np.ndarray, groups: Sequence[PrefixGroup]) -> int:
        """Block ids of the launch: of each row, with a group's shared ones once."""
        saved = sum((group.end_row - group.first_row - 1) * group.num_blocks for group in groups)
        return int(self._row_blocks(kv_lens).sum()) - saved

    def write(
        self,
        numbers: Tensor,
        tables: np.ndarray,
        kv_lens: np.ndarray,
        groups: Sequence[PrefixGroup],
    ) -> None:
        """Fill a host buffer with a step's numbers.

        Args:
            numbers: int32, at least `num_fixed` and `num_blocks` of them.
            tables: int32 [num_rows, max_blocks]; kv_lens: int32 [num_rows], at least 1.
            groups: disjoint, at most `max_tiles` tiles; each row keeps at least one slot.
        """
        shared = np.zeros(self.num_rows, dtype=np.int32)
        for group in groups:
            shared[group.first_row : group.end_row] = group.num_blocks
        own = self._row_blocks(kv_lens) - shared  # [num_rows]
        assert own.min() >= 1, f"{groups=} leave a row of {kv_lens=} nothing of its own"
        firsts, ends, blocks = (
            np.array([group[:3] for group in groups], dtype=np.int64).reshape(-1, 3).T
        )  # [num_groups] each
        arrays = self.arrays(numbers, int(own.sum() + blocks.sum()))
        host = GroupedArrays(*(part.numpy() for part in arrays))
        self._write_entries(host, kv_lens, own, (firsts, ends, blocks))
        self._write_items(host, own, (ends - firsts, blocks))
        host.has_shared[:] = shared > 0
        _write_block_ids(host.block_ids, tables, shared, own, groups)

    @property
    def _sizes(self) -> tuple[int, ...]:
        starts, items = self._num_entries + 1, self._num_items
        return (starts, starts, self._num_entries, starts, items, items, items, 1, self.num_rows)

    def _row_blocks(self, kv_lens: np.ndarray) -> np.ndarray:
        return (kv_lens + self._heads.block_size - 1) // self._heads.block_size  # [num_rows]

    def _write_entries(
        self,
        host: GroupedArrays[np.ndarray],
        kv_lens: np.ndarray,
        own: np.ndarray,
        groups: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        (firsts, ends, blocks), num_rows = groups, self.num_rows
        entries, block_size = self._group_entries(len(firsts)), self._heads.block_size
        host.q_starts[:num_rows] = host.out_starts[:num_rows] = np.arange(num_rows)
        host.q_starts[num_rows:] = num_rows
        host.q_starts[entries], host.q_starts[_next(entries)] = firsts, ends
        host.out_starts[num_rows:] = 0
        host.out_starts[entries] = num_rows + firsts
        lens = np.zeros(self._num_entries, dtype=np.int64)
        lens[:num_rows], lens[entries] = own, blocks
        host.block_starts[0] = 0
        np.cumsum(lens, out=host.block_starts[1:])
        host.last_block_lens[:num_rows] = (kv_lens - 1) % block_size + 1
        host.last_block_lens[num_rows:] = block_size

    def _write_items(
        self,
        host: GroupedArrays[np.ndarray],
        own: np.ndarray,
        groups: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Long items first, so that the short ones fill the card's last gaps; then the idle."""
        (num_rows_of, blocks), num_rows = groups, self.num_rows
        group_size = self._heads.num_q_heads // self._heads.num_kv_heads
        tiles = -(-num_rows_of * group_size // DECODE_TILE_ROWS)  # [num_groups]
        num_used = num_rows + int(tiles.sum())
        assert num_used <= self._num_items, f"{tiles=} of {self.max_tiles}"
        group_entries = np.arange(self._num_entries)[self._group_entries(len(blocks))]
        entries = np.concatenate([np.arange(num_rows), np.repeat(group_entries, tiles)])
        first_items = np.repeat(np.cumsum(tiles) - tiles, tiles)
        tile_of = np.zeros(num_used, dtype=np.int64)
        tile_of[num_rows:] = np.arange(num_used - num_rows) - first_items
        lens = np.concatenate([own, np.repeat(blocks, tiles)])  # [num_used]
        order = np.argsort(-lens, kind="stable")
        host.item_entries[:num_used] = entries[order]
        host.item_tiles[:num_used] = tile_of[order]
        host.item_entries[num_used:], host.item_tiles[num_used:] = self._num_entries - 1, 0
        host.item_chunks[:], host.chunk_len[:] = 0, _CHUNK_LEN

    def _group_entries(self, num_groups: int) -> slice:
        first = self.num_rows + 1
        return slice(first, first + 2 * num_groups, 2)


def _next(entries: slice) -> slice:
    return slice(entries.start + 1, entries.stop + 1, entries.step)


def _write_block_ids(
    block_ids: np.ndarray,
    tables: np.ndarray,
    shared: np.ndarray,
    own: np.ndarray,
    groups: Sequence[PrefixGroup],
) -> None:
    """Each row's own blocks, then each group's."""
    columns = np.arange(tables.shape[1], dtype=np.int32)
    end = (shared + own)[:, None]  # [num_rows, 1]
    is_own = (columns >= shared[:, None]) & (columns < end)  # [num_rows, max_blocks]
    pieces = [tables[is_own]]
    pieces += [tables[group.first_row, : group.num_blocks] for group in groups]
    np.concatenate(pieces, out=block_ids)
    assert block_ids.min() >= 0, "a block table is shorter than its kv_len"
