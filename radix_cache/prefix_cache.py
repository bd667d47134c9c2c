"""The scheduler's door to KV memory: find, share, grow, compact and give back blocks.

Knows nothing of requests, steps, policies or tensors.

A table's leading `num_prefix_blocks` blocks are the tree's own blocks, and it locks that path. It
locks nothing whose blocks it does not hold, so what can be had is exactly free + tree-only blocks.
Shared blocks are never written: a partly filled last block is copied when it is written to, and a
compaction writes only to blocks that this table holds alone.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from zipage_lang.radix_cache.block_pool import BlockPool
from zipage_lang.radix_cache.block_table import (
    Append,
    BlockTable,
    CompactionBlocks,
    SwappedTable,
    check_tables,
)
from zipage_lang.radix_cache.census import take_census
from zipage_lang.radix_cache.radix_tree import (
    AtomicNode,
    CompactedState,
    Node,
    PlainNode,
    RadixTree,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the cache has of some tokens. Good for open() until something is evicted."""

    namespace: str
    num_tokens: int = 0  # logical tokens covered
    resident_len: int = 0
    block_ids: tuple[int, ...] = ()
    num_prefix_blocks: int = 0  # leading blocks that are plain
    stateful_len: int = 0  # as given to close() by who left the compacted state
    num_asked: int = 0  # tokens that were looked up
    node: Node | None = dataclasses.field(default=None, repr=False)  # None: nothing found

    @property
    def is_compacted(self) -> bool:
        return isinstance(self.node, AtomicNode)


class PrefixCache:
    """Composes pool and tree. Every verb keeps the laws that check_invariants() states."""

    def __init__(self, num_blocks: int, block_size: int, *, enabled: bool = True) -> None:
        """`num_blocks` usable blocks (ids from 1) of `block_size` slots.

        With `enabled` False nothing is kept after close and nothing is found; forks still share.
        Raises ValueError when a count is below 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        self.block_size = block_size
        self.enabled = enabled
        self.num_tokens_asked = 0  # of all opened matches
        self.num_tokens_hit = 0
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(self._pool, block_size)
        self._num_evicted_nodes = 0
        self._num_copied_blocks = 0
        self._num_taken_over_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and those held only by the tree."""
        return self._pool.num_free + self._pool.num_tree_only

    @property
    def peak_held(self) -> int:
        """The most blocks that tables held at once, since the start or the last `flush`."""
        return self._pool.peak_held

    def match(
        self,
        token_ids: Sequence[int],
        *,
        namespace: str,
        signature: str | None,
        max_plain_len: int | None = None,
    ) -> Match:
        """The longest cached state of `token_ids` that leaves at least one token to compute.

        Plain path or compacted state, whichever covers more logical tokens; plain when equal.
        `signature` None finds no compacted state; a plain path counts up to `max_plain_len` tokens.
        Takes no holds and changes nothing.
        """
        nothing = Match(namespace=namespace, num_asked=len(token_ids))
        root = self._tree.find_root(namespace)
        max_len = len(token_ids) - 1
        if root is None or max_len < 1 or not self.enabled:
            return nothing
        walk = self._tree.walk(root, token_ids, max_len // self.block_size)
        plain_depth = walk.depth
        if max_plain_len is not None:
            plain_depth = min(plain_depth, max_plain_len // self.block_size)
        plain_len = plain_depth * self.block_size
        if signature is not None:
            atomic = self._tree.find_atomic(walk, token_ids, signature, max_len)
            if atomic is not None and atomic.logical_len > plain_len:
                return dataclasses.replace(
                    nothing,
                    num_tokens=atomic.logical_len,
                    resident_len=atomic.state.resident_len,
                    block_ids=(*walk.block_ids[: atomic.anchor], *atomic.block_ids),
                    num_prefix_blocks=atomic.anchor,
                    stateful_len=atomic.state.stateful_len,
                    node=atomic,
                )
        if plain_depth == 0:
            return nothing
        return dataclasses.replace(
            nothing,
            num_tokens=plain_len,
            resident_len=plain_len,
            block_ids=tuple(walk.block_ids[:plain_depth]),
            num_prefix_blocks=plain_depth,
            node=walk.node,
        )

    def open(self, match: Match) -> BlockTable:
        """A table that goes on from `match`. Raises AssertionError when that has been evicted."""
        self.num_tokens_asked += match.num_asked
        self.num_tokens_hit += match.num_tokens
        table = self._hold(match)
        if match.num_tokens:
            self._tree.note_hit(self._locked(table))
        return table

    def undo_open(self, table: BlockTable, match: Match) -> None:
        """There was no room to go on from `match` after all: the lookup does not count."""
        self.num_tokens_asked -= match.num_asked
        self.num_tokens_hit -= match.num_tokens
        if match.num_tokens:
            self._tree.forget_hit(self._locked(table))
        self.drop(table)

    def _hold(self, match: Match) -> BlockTable:
        node = match.node or self._tree.root(match.namespace)
        assert self._tree.contains(node, match.namespace), (
            f"stale match of {match.num_tokens} tokens"
        )
        table = BlockTable(
            namespace=match.namespace,
            block_size=self.block_size,
            block_ids=list(match.block_ids),
            resident_len=match.resident_len,
            logical_len=match.num_tokens,
            num_prefix_blocks=match.num_prefix_blocks,
        )
        if isinstance(node, AtomicNode):
            table.is_compacted = True
            table.compacted_plain_len = node.state.plain_len
            table.compacted_len = node.state.compacted_len
        else:
            node = self._tree.node_ending_at(node, match.num_prefix_blocks)
        for block_id in table.block_ids:
            self._pool.hold_for_table(block_id)
        self._tree.lock(node)
        self._tree.touch(node)
        table.lock_node = node
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; a shared last block is copied when written to."""
        self._assert_idle(table)
        for block_id in table.block_ids:
            self._pool.hold_for_table(block_id)
        self._tree.lock(self._locked(table))
        return dataclasses.replace(table, block_ids=list(table.block_ids))

    def num_new_blocks(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that append() would take."""
        num_blocks = table.num_blocks_for(table.resident_len + num_tokens)
        must_copy = num_tokens > 0 and self._is_last_block_shared(table)
        return num_blocks - len(table.block_ids) + must_copy

    def append(self, table: BlockTable, num_tokens: int) -> Append | None:
        """Make room for `num_tokens` more tokens and count them as there.

        Evicts the least recently used of the tree as needed. None, and no change, when blocks are
        short even so.
        """
        self._assert_idle(table)
        # Asked before anything is evicted: that can leave this table alone with its last block.
        must_copy = num_tokens > 0 and self._is_last_block_shared(table)
        new_ids = self._allocate(self.num_new_blocks(table, num_tokens))
        if new_ids is None:
            return None
        first, copy = len(table.block_ids), None
        if must_copy:
            first, copy = first - 1, (table.block_ids[-1], new_ids[0])
            self._leave_atomic(table)
            self._pool.release_for_table(table.block_ids.pop())
            self._num_copied_blocks += 1
        table.block_ids += new_ids
        table.resident_len += num_tokens
        table.logical_len += num_tokens
        return Append(first, tuple(new_ids), copy)

    def append_in_place(self, table: BlockTable) -> bool:
        """As append() of one token, if it needs no block: nearly every decode. Else no change."""
        self._assert_idle(table)
        if table.resident_len % self.block_size == 0 or self._pool.is_shared(table.block_ids[-1]):
            return False
        table.resident_len += 1
        table.logical_len += 1
        return True

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: share their full blocks through the tree.

        Where the tree already spells the tokens over other blocks (two requests computed the same),
        the table keeps its own and shares no deeper. Nothing is done for compacted tables.
        """
        self._assert_idle(table)
        assert num_tokens <= table.logical_len, f"{num_tokens} tokens of {table.logical_len}"
        num_full = num_tokens // self.block_size
        if table.is_compacted or not self.enabled or num_full <= table.num_prefix_blocks:
            return
        locked = self._locked(table)
        assert not isinstance(locked, AtomicNode), "only compacted tables lock atomic nodes"
        start = table.num_prefix_blocks
        next_block = self._tree.walk(locked, token_ids, start + 1).block_ids
        if next_block and next_block[0] != table.block_ids[start]:
            return  # a copy computed by another: asked at every step, so no longer walk for it
        walk = self._tree.walk(locked, token_ids, num_full)
        depth = start + _num_equal(walk.block_ids, table.block_ids[start:])
        node = self._tree.node_ending_at(walk.node, depth)
        if depth == walk.depth < num_full:
            block_ids = table.block_ids[depth:num_full]
            depth = num_full
            if node is locked and node.is_leaf and node.lock_count == 1 and node.parent is not None:
                self._tree.extend(node, token_ids, block_ids)
            else:
                node = self._tree.add_blocks(node, token_ids, block_ids)
        self._move_lock(table, node, depth)
        self._tree.touch(node)

    def plan_compaction(
        self, table: BlockTable, protected_len: int, num_keep: int
    ) -> CompactionBlocks | None:
        """Find blocks that a compaction may write: slots [protected_len, protected_len + num_keep).

        A block there that other tables hold gets a new block and a copy; one that else only nodes
        hold is taken over (they are evicted). None when blocks are short; then nothing has
        changed but takeovers. Until finish or cancel the table must stay as it is.
        """
        self._assert_idle(table)
        kept_len = protected_len + num_keep
        assert 0 <= protected_len <= kept_len <= table.resident_len, (
            f"keeping {protected_len} + {num_keep} of {table.resident_len} slots"
        )
        first, end = protected_len // self.block_size, table.num_blocks_for(kept_len)
        self._shrink_lock(table, first)
        shared = [i for i in table.block_ids[first:end] if not self._can_write(i)]
        new_ids = self._allocate(len(shared))
        if new_ids is None:
            return None
        copies = dict(zip(shared, new_ids, strict=True))
        self._num_copied_blocks += len(copies)
        table.compaction = CompactionBlocks(
            protected_len=protected_len,
            block_ids_before=tuple(table.block_ids),
            block_ids=tuple(copies.get(i, i) for i in table.block_ids[:end]),
            copies=tuple(copies.items()),
        )
        return table.compaction

    def finish_compaction(
        self, table: BlockTable, blocks: CompactionBlocks, *, resident_len: int
    ) -> None:
        """The compaction was carried out: `resident_len` slots are left, in `blocks.block_ids`."""
        self._assert_compacting(table, blocks)
        assert table.num_blocks_for(resident_len) == len(blocks.block_ids), (
            f"{resident_len} slots left in {len(blocks.block_ids)} blocks"
        )
        for block_id in set(table.block_ids).difference(blocks.block_ids):
            self._pool.release_for_table(block_id)
        table.compacted_plain_len = min(table.plain_len, blocks.protected_len)
        table.block_ids = list(blocks.block_ids)
        table.resident_len = table.compacted_len = resident_len
        table.is_compacted, table.compaction = True, None

    def cancel_compaction(self, table: BlockTable, blocks: CompactionBlocks) -> None:
        """Give back the new blocks. If the compaction may have run, only drop() may follow."""
        self._assert_compacting(table, blocks)
        for _, new_id in blocks.copies:
            self._pool.release_for_table(new_id)
        table.compaction = None

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens off; the blocks no longer needed are released.

        Only tokens that came after the last compaction can be taken off.
        """
        self._assert_idle(table)
        resident_len = table.resident_len - num_tokens
        lowest = table.compacted_len if table.is_compacted else 0
        assert lowest <= resident_len <= table.resident_len, (
            f"{num_tokens} of {table.resident_len} slots taken off, {lowest} must stay"
        )
        if num_tokens == 0:
            return
        self._leave_atomic(table)
        self._shrink_lock(table, resident_len // self.block_size)
        table.resident_len = resident_len
        table.logical_len -= num_tokens
        while len(table.block_ids) > table.num_blocks_for(resident_len):
            self._pool.release_for_table(table.block_ids.pop())

    def close(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        *,
        signature: str | None,
        stateful_len: int,
    ) -> None:
        """End or preemption: leave what the table holds in the tree, then release it.

        All `table.logical_len` tokens must be computed (truncate first what is not). Full plain
        blocks stay as plain nodes, a compacted rest as one atomic node under `signature` (None: the
        compacted rest is not kept).
        """
        self._assert_idle(table)
        assert len(token_ids) >= table.logical_len, (
            f"{len(token_ids)} of {table.logical_len} tokens"
        )
        if self.enabled:
            self._keep(table, token_ids, signature, stateful_len)
        self.drop(table)

    def drop(self, table: BlockTable) -> None:
        """Release all that the table holds, leaving nothing new in the tree."""
        self._assert_idle(table)
        self._tree.unlock(self._locked(table))
        for block_id in table.block_ids:
            self._pool.release_for_table(block_id)
        table.block_ids, table.num_prefix_blocks, table.lock_node = [], 0, None
        table.resident_len = table.logical_len = 0

    def swap_out(self, table: BlockTable) -> SwappedTable:
        """Release a table whose blocks (read them first) go to host memory."""
        swapped = SwappedTable(
            namespace=table.namespace,
            num_blocks=len(table.block_ids),
            resident_len=table.resident_len,
            logical_len=table.logical_len,
            is_compacted=table.is_compacted,
            compacted_plain_len=table.compacted_plain_len,
            compacted_len=table.compacted_len,
        )
        self.drop(table)
        return swapped

    def swap_in(self, swapped: SwappedTable, token_ids: Sequence[int]) -> BlockTable | None:
        """A table for what comes back; None when blocks are short.

        Its leading `num_prefix_blocks` blocks are what the tree still has of the plain part, and
        are not to be written; the rest are private and wait for their contents.
        """
        known = token_ids[: swapped.plain_len + 1]
        table = self._hold(self.match(known, namespace=swapped.namespace, signature=None))
        block_ids = self._allocate(swapped.num_blocks - len(table.block_ids))
        if block_ids is None:
            self.drop(table)
            return None
        table.block_ids += block_ids
        table.resident_len, table.logical_len = swapped.resident_len, swapped.logical_len
        table.is_compacted = swapped.is_compacted
        table.compacted_plain_len = swapped.compacted_plain_len
        table.compacted_len = swapped.compacted_len
        return table

    def flush(self) -> int:
        """Evict all that is unlocked, and count the peak anew. Returns how many blocks it freed."""
        num_free = self._pool.num_free
        self._pool.restart_peak()
        while self._evict_oldest():
            pass
        return self._pool.num_free - num_free

    def stats(self) -> dict[str, int]:
        """Counts now (blocks, nodes) and since the start (the rest; the peak since a flush)."""
        return {
            "num_blocks": self._pool.num_blocks,
            "num_free": self._pool.num_free,
            "num_held": self._pool.num_held,
            "num_tree_only": self._pool.num_tree_only,
            "peak_held": self._pool.peak_held,
            "num_plain_nodes": self._tree.num_plain_nodes,
            "num_atomic_nodes": self._tree.num_atomic_nodes,
            "num_tokens_asked": self.num_tokens_asked,
            "num_tokens_hit": self.num_tokens_hit,
            "num_evicted_nodes": self._num_evicted_nodes,
            "num_copied_blocks": self._num_copied_blocks,
            "num_taken_over_blocks": self._num_taken_over_blocks,
        }

    def roots(self) -> list[PlainNode]:
        """Where the tree begins, for who wants to look at it: one root per namespace."""
        return self._tree.roots()

    def owners(self, running: Iterable[BlockTable], held: Iterable[BlockTable]) -> bytearray:
        """An Owner per block id, given all open tables: those of held states apart."""
        return take_census(self._pool, self._tree, running, held)

    def check_invariants(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Raise AssertionError, with numbers, when a law of pool, tree or tables is broken.

        With `tables` (all that are open) holds and locks are counted again and compared.
        """
        self._pool.check_invariants()
        self._tree.check_invariants()
        if tables is not None:
            check_tables(self._pool, self._tree, list(tables))

    def _keep(
        self, table: BlockTable, token_ids: Sequence[int], signature: str | None, stateful_len: int
    ) -> None:
        num_plain = table.plain_len // self.block_size
        anchor = self._tree.insert(table.namespace, token_ids, table.block_ids[:num_plain])
        node: Node = anchor
        span = tuple(token_ids[num_plain * self.block_size : table.logical_len])
        if table.is_compacted and span and signature is not None:
            state = CompactedState(
                span=span,
                signature=signature,
                block_ids=tuple(table.block_ids[num_plain:]),
                resident_len=table.resident_len,
                stateful_len=stateful_len,
                plain_len=table.plain_len,
                compacted_len=table.compacted_len,
            )
            node = self._tree.insert_atomic(anchor, state)
        self._tree.touch(node)

    def _allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks for a table, from the tree if need be; None, and no eviction, when it can't be."""
        if num_blocks > self.num_available:
            return None
        while self._pool.num_free < num_blocks:
            evicted = self._evict_oldest()
            assert evicted, f"{self._pool.num_tree_only} blocks only in the tree, yet all is locked"
        return self._pool.allocate(num_blocks)

    def _evict_oldest(self) -> bool:
        evicted = self._tree.evict_oldest()
        self._num_evicted_nodes += evicted
        return evicted

    def _is_last_block_shared(self, table: BlockTable) -> bool:
        """True when the next token falls into a block that others hold too."""
        return table.has_room and self._pool.is_shared(table.block_ids[-1])

    def _can_write(self, block_id: int) -> bool:
        """True when the table that asks is alone with the block, if need be after a takeover."""
        if self._pool.num_table_holds(block_id) > 1:
            return False
        if self._pool.num_node_holds(block_id) > 0:
            # Who locks a node holds its blocks too, so here nothing is locked any more.
            self._tree.detach_block(block_id)
            self._num_taken_over_blocks += 1
        return True

    def _move_lock(self, table: BlockTable, node: PlainNode, num_prefix_blocks: int) -> None:
        before = self._locked(table)
        if node is not before:
            self._tree.lock(node)
            self._tree.unlock(before)
        table.lock_node, table.num_prefix_blocks = node, num_prefix_blocks

    def _leave_atomic(self, table: BlockTable) -> None:
        """Lock only the plain path: the table is about to part with a block of its atomic node."""
        self._shrink_lock(table, table.num_prefix_blocks)

    def _shrink_lock(self, table: BlockTable, num_blocks: int) -> None:
        """Lock no more than a plain path of `num_blocks` blocks."""
        locked = self._locked(table)
        plain = locked.parent if isinstance(locked, AtomicNode) else locked
        assert plain is not None, "a locked node left the tree"
        depth = min(table.num_prefix_blocks, num_blocks)
        self._move_lock(table, self._tree.node_ending_at(plain, depth), depth)

    def _locked(self, table: BlockTable) -> Node:
        assert table.lock_node is not None, "this table is closed"
        return table.lock_node

    def _assert_idle(self, table: BlockTable) -> None:
        assert table.lock_node is not None, "this table is closed"
        assert table.compaction is None, "finish or cancel this table's compaction first"

    def _assert_compacting(self, table: BlockTable, blocks: CompactionBlocks) -> None:
        assert table.is_open, "this table is closed"
        assert table.compaction is blocks, f"{blocks} is not what this table has under way"


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common leading part."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
