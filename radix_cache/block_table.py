"""One request's blocks and lengths, and the small records that say how they change.

Knows nothing of how blocks are found, shared or evicted; only the prefix cache changes a table.

    blocks      [ plain tree prefix | rest                          ]
    not compacted: slot i holds token i            resident_len == logical_len
    compacted:   [0, plain_len) slot i holds token i
                 [plain_len, compacted_len) survivors, in no order
                 [compacted_len, resident_len) the newest tokens, in order
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from zipage_lang.radix_cache.block_pool import BlockPool
from zipage_lang.radix_cache.radix_tree import AtomicNode, Node, RadixTree, upwards


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """From index `first` on the table is now `block_ids`; copy one block before writing to it."""

    first: int
    block_ids: tuple[int, ...]
    copy: tuple[int, int] | None  # (src, dst): the shared, partly filled last block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompactionBlocks:
    """The blocks before and after a compaction, and the copies (src, dst) to make first."""

    protected_len: int
    block_ids_before: tuple[int, ...]
    block_ids: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class BlockTable:
    """Block i holds the resident slots [i * block_size, (i + 1) * block_size)."""

    namespace: str
    block_size: int
    block_ids: list[int] = dataclasses.field(default_factory=list)
    resident_len: int = 0  # slots in use
    logical_len: int = 0  # tokens computed
    num_prefix_blocks: int = 0  # leading blocks that are the tree's own, at their plain place
    is_compacted: bool = False
    compaction: CompactionBlocks | None = None  # planned, neither finished nor cancelled
    compacted_plain_len: int = 0  # once compacted: leading slots that never were
    compacted_len: int = 0  # once compacted: slots the last compaction left
    # The tree node this table locks; None once the table is closed.
    lock_node: Node | None = dataclasses.field(default=None, repr=False)

    @property
    def plain_len(self) -> int:
        """Leading slots that no compaction touched: slot i holds token i."""
        return self.compacted_plain_len if self.is_compacted else self.logical_len

    @property
    def is_compacting(self) -> bool:
        return self.compaction is not None

    @property
    def is_open(self) -> bool:
        return self.lock_node is not None

    @property
    def has_room(self) -> bool:
        """True when the last block is only partly filled."""
        return self.resident_len % self.block_size > 0

    def num_blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwappedTable:
    """What is left of a table whose blocks went to host memory: its lengths."""

    namespace: str
    num_blocks: int
    resident_len: int
    logical_len: int
    is_compacted: bool
    compacted_plain_len: int
    compacted_len: int

    @property
    def plain_len(self) -> int:
        """Leading slots that no compaction touched."""
        return self.compacted_plain_len if self.is_compacted else self.logical_len


def check_tables(pool: BlockPool, tree: RadixTree, tables: Sequence[BlockTable]) -> None:
    """Raise AssertionError unless `tables`, all the open ones, explain all holds and locks."""
    for table in tables:
        _check_table(table)
    holds = Counter(block_id for table in tables for block_id in _held_blocks(table))
    for block_id in range(1, pool.num_blocks + 1):
        counted = pool.num_table_holds(block_id)
        assert counted == holds[block_id], f"block {block_id}: {counted} of {holds[block_id]} holds"
    locks = Counter(
        node.serial for table in tables if table.lock_node for node in upwards(table.lock_node)
    )
    for node in tree.nodes():
        wanted = locks[node.serial]
        assert node.lock_count == wanted, f"node {node.serial}: {node.lock_count} of {wanted} locks"


def _held_blocks(table: BlockTable) -> list[int]:
    new_ids = [] if table.compaction is None else [new for _, new in table.compaction.copies]
    return table.block_ids + new_ids


def _check_table(table: BlockTable) -> None:
    lengths = (table.plain_len, table.resident_len, table.logical_len)
    assert list(lengths) == sorted(lengths), f"plain, resident, logical length {lengths}"
    num_blocks = table.num_blocks_for(table.resident_len)
    assert len(table.block_ids) == num_blocks, f"{len(table.block_ids)} blocks, not {num_blocks}"
    assert len(set(table.block_ids)) == num_blocks, f"a block stands twice in {table.block_ids}"
    if table.is_compacted:
        assert table.plain_len <= table.compacted_len <= table.resident_len, f"{lengths}"
    else:
        assert table.resident_len == table.logical_len, f"not compacted, yet {lengths}"
    _check_locked_blocks(table)


def _check_locked_blocks(table: BlockTable) -> None:
    """The locked path is the table's own leading blocks, all of it."""
    locked = [] if table.lock_node is None else list(upwards(table.lock_node))
    assert locked, "a closed table is among the open ones"
    path = [block_id for node in reversed(locked) for block_id in node.block_ids]
    assert table.block_ids[: len(path)] == path, f"{path} is locked, {table.block_ids} are held"
    num_atomic = len(locked[0].block_ids) if isinstance(locked[0], AtomicNode) else 0
    num_plain = len(path) - num_atomic
    assert table.num_prefix_blocks == num_plain, f"{table.num_prefix_blocks} of {num_plain} blocks"
    assert num_plain * table.block_size <= table.plain_len, f"{num_plain} blocks are not all plain"
