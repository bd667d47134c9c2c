"""Who holds each block of the KV pool: free list and counts of holds.

Knows nothing of tokens, trees or what a block contains.

A block can be held by block tables (running requests) and by tree nodes (the cache). It is free
exactly when nobody holds it. Block 0 is the dummy and is never handed out:

    free  --allocate-->  held by tables  <---->  held by both  <---->  held only by the tree
      ^------------------------'                                               |
      ^------------------------------------------------------------------------'
"""

from collections.abc import Iterator


class BlockPool:
    """Ids 1..num_blocks with two counts each. All verbs are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} must be at least 1")
        self.num_blocks = num_blocks
        self.num_tree_only = 0  # held by nodes and by no table: what evicting can free
        self.peak_held = 0  # the most blocks that tables held at once since `restart_peak`
        self._free = list(range(num_blocks, 0, -1))  # the last one goes first
        self._table_holds = [0] * (num_blocks + 1)
        self._node_holds = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks held by at least one table."""
        return self.num_blocks - self.num_free - self.num_tree_only

    def num_table_holds(self, block_id: int) -> int:
        return self._table_holds[block_id]

    def num_node_holds(self, block_id: int) -> int:
        return self._node_holds[block_id]

    def holds(self) -> Iterator[tuple[int, int]]:
        """(holds by tables, holds by nodes) of every block id, the dummy's first."""
        return zip(self._table_holds, self._node_holds, strict=True)

    def is_shared(self, block_id: int) -> bool:
        """True when a table that holds this block is not alone, so must not write to it."""
        return self._table_holds[block_id] + self._node_holds[block_id] > 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, each with one table hold. The caller sees to it that they are there."""
        assert 0 <= num_blocks <= self.num_free, f"{num_blocks} wanted of {self.num_free} free"
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._table_holds[block_id] = 1
        self._note_peak()
        return block_ids

    def hold_for_table(self, block_id: int) -> None:
        self._assert_in_use(block_id)
        if self._table_holds[block_id] == 0:
            self.num_tree_only -= 1
        self._table_holds[block_id] += 1
        self._note_peak()

    def release_for_table(self, block_id: int) -> None:
        holds = self._table_holds[block_id]
        assert holds > 0, f"block {block_id} has {holds} table holds to release"
        self._table_holds[block_id] = holds - 1
        if holds > 1:
            return
        if self._node_holds[block_id]:
            self.num_tree_only += 1
        else:
            self._free.append(block_id)

    def hold_for_node(self, block_id: int) -> None:
        self._assert_in_use(block_id)
        self._node_holds[block_id] += 1

    def release_for_node(self, block_id: int) -> None:
        holds = self._node_holds[block_id]
        assert holds > 0, f"block {block_id} has {holds} node holds to release"
        self._node_holds[block_id] = holds - 1
        if holds == 1 and self._table_holds[block_id] == 0:
            self.num_tree_only -= 1
            self._free.append(block_id)

    def restart_peak(self) -> None:
        """Forget how many blocks were ever held at once, but for those that are now."""
        self.peak_held = self.num_held

    def check_invariants(self) -> None:
        """Raise AssertionError unless free + held by tables + tree-only is the whole pool."""
        ids = range(1, self.num_blocks + 1)
        assert min(self._table_holds) >= 0, f"negative table holds in {self._table_holds}"
        assert min(self._node_holds) >= 0, f"negative node holds in {self._node_holds}"
        unheld = [i for i in ids if self._table_holds[i] + self._node_holds[i] == 0]
        assert sorted(self._free) == unheld, f"free list {sorted(self._free)}, unheld {unheld}"
        tree_only = sum(1 for i in ids if self._node_holds[i] and not self._table_holds[i])
        assert self.num_tree_only == tree_only, f"{self.num_tree_only} counted, {tree_only} are"
        held = sum(1 for i in ids if self._table_holds[i])
        total = self.num_free + held + tree_only
        assert total == self.num_blocks, f"{self.num_free} + {held} + {tree_only} blocks"
        assert held <= self.peak_held, f"{held} held above the peak of {self.peak_held}"
        dummy = self._table_holds[0] + self._node_holds[0]
        assert dummy == 0, f"dummy block 0 has {dummy} holds"

    def _assert_in_use(self, block_id: int) -> None:
        holds = self._table_holds[block_id] + self._node_holds[block_id]
        assert holds > 0, f"block {block_id} is free; only allocate() takes free blocks"

    def _note_peak(self) -> None:
        self.peak_held = max(self.peak_held, self.num_held)
