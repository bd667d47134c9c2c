"""Who each block of the pool serves, for people who look: one small number per block.

Knows nothing of requests, steps or how this is drawn.
"""

import enum
from collections import Counter
from collections.abc import Iterable

from zipage_lang.radix_cache.block_pool import BlockPool
from zipage_lang.radix_cache.block_table import BlockTable
from zipage_lang.radix_cache.radix_tree import AtomicNode, RadixTree


class Owner(enum.IntEnum):
    """What a block is to the pool. Each block is exactly one of these."""

    FREE = 0
    PREFIX = 1  # read by at least one table, and in the tree or shared between tables
    CACHED = 2  # only the tree has it: found again by its tokens, or evicted
    TAIL = 3  # one running table's own
    COMPACTED = 4  # what a compaction left, in use
    CACHED_COMPACTED = 5  # what a compaction left, and only the tree has it
    HELD = 6  # no running table has it, but a state that is held for a fork


def take_census(
    pool: BlockPool, tree: RadixTree, running: Iterable[BlockTable], held: Iterable[BlockTable]
) -> bytearray:
    """An Owner per block id; entry 0, the dummy's, says FREE. Linear in blocks and nodes."""
    owners = _by_holds(pool)
    in_use, left_behind = int(Owner.COMPACTED), int(Owner.CACHED_COMPACTED)
    for node in tree.nodes():
        if isinstance(node, AtomicNode):
            for block_id in node.block_ids:
                owners[block_id] = in_use if pool.num_table_holds(block_id) else left_behind
    for table in running:
        for block_id in _compacted_blocks(table):
            owners[block_id] = in_use
    for block_id, holds in Counter(b for table in held for b in table.block_ids).items():
        if holds == pool.num_table_holds(block_id):
            owners[block_id] = Owner.HELD
    return owners


def _by_holds(pool: BlockPool) -> bytearray:
    """What the counts of holds alone tell. Plain numbers: this runs over the whole pool."""
    free, prefix, cached, tail = map(int, (Owner.FREE, Owner.PREFIX, Owner.CACHED, Owner.TAIL))
    return bytearray(
        [
            (prefix if nodes or tables > 1 else tail) if tables else (cached if nodes else free)
            for tables, nodes in pool.holds()
        ]
    )


def _compacted_blocks(table: BlockTable) -> list[int]:
    """Blocks with survivors of a compaction, the one they share with the protected part too."""
    if not table.is_compacted:
        return []
    first = table.plain_len // table.block_size
    return table.block_ids[first : table.num_blocks_for(table.compacted_len)]
