"""Which cached blocks stand for which tokens: a radix tree with locks and LRU eviction.

Knows nothing of block tables, requests or when something should be evicted.

Two kinds of nodes. A *plain* node is an edge of whole blocks whose slots spell its tokens, one
slot per token. An *atomic* node hangs behind a plain node (or root) and stands for a compacted
state: its blocks no longer spell the tokens of its span, so it is found whole or not at all.

    root -[t0 t1 | t2 t3]- plain -[t4 t5]- plain       path of 3 blocks, block size 2
                             '==(t4 .. t20)== atomic   17 tokens in, say, 4 blocks

Locks are counted from a node up to its root, so below an unlocked node nothing is locked.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from sortedcontainers import SortedKeyList

from zipage_lang.radix_cache.block_pool import BlockPool


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class PlainNode:
    """An edge of the tree. `start` is the number of blocks on the path before it."""

    # None for a root and for a node that left the tree.
    parent: "PlainNode | None" = dataclasses.field(repr=False)
    namespace: str
    tokens: list[int]
    block_ids: list[int]
    start: int
    serial: int
    last_use: int
    lock_count: int = 0
    num_hits: int = 0  # lookups that took all or part of it
    is_listed: bool = False  # in the list of evictable leaves
    children: "dict[tuple[int, ...], PlainNode]" = dataclasses.field(
        default_factory=dict, repr=False
    )
    atomic_nodes: "list[AtomicNode]" = dataclasses.field(default_factory=list, repr=False)

    @property
    def end(self) -> int:
        """Number of blocks on the path from the root to the end of this edge."""
        return self.start + len(self.block_ids)

    @property
    def is_leaf(self) -> bool:
        return not self.children and not self.atomic_nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompactedState:
    """What an atomic node stands for and what a table needs to go on from it."""

    span: tuple[int, ...]  # every logical token behind the anchor
    signature: str
    block_ids: tuple[int, ...]  # every resident block behind the anchor, the last maybe part filled
    resident_len: int  # slots in use, those before the anchor included
    stateful_len: int  # leading tail slots that carry slot state
    plain_len: int  # leading slots that no compaction touched: slot i holds token i
    compacted_len: (
        int  # leading slots that the last compaction left; behind them slots are in order
    )


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class AtomicNode:
    """A compacted state in the tree. Never split, never has children."""

    parent: PlainNode | None = dataclasses.field(repr=False)  # None once it left the tree
    anchor: int  # blocks on the plain path before it
    logical_len: int  # tokens it covers from the root on
    state: CompactedState
    serial: int
    last_use: int
    lock_count: int = 0
    num_hits: int = 0  # lookups that went on from it
    is_listed: bool = False

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.state.block_ids

    @property
    def is_leaf(self) -> bool:
        return True

    def spells(self, token_ids: Sequence[int], first: int) -> bool:
        """True when the span is a leading part of `token_ids[first:]`."""
        span, end = self.state.span, first + len(self.state.span)
        # The last token first: it tells apart most spans of one anchor without a long comparison.
        return (
            end <= len(token_ids)
            and token_ids[end - 1] == span[-1]
            and tuple(token_ids[first:end]) == span
        )


Node = PlainNode | AtomicNode


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """How far the tree spells some tokens: `depth` blocks, ending in or at the end of `node`."""

    node: PlainNode
    depth: int
    block_ids: list[int]  # of the blocks passed


class RadixTree:
    """One root per namespace. A node holds its blocks in the pool while it is in the tree."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[str, PlainNode] = {}
        self._leaves = SortedKeyList(key=lambda node: (node.last_use, node.serial))
        self._holders: dict[int, list[Node]] = {}  # block id -> nodes that hold it
        self._clock = 0
        self._num_made = 0
        self.num_plain_nodes = 0
        self.num_atomic_nodes = 0

    def root(self, namespace: str) -> PlainNode:
        """The namespace's root; made when missing, gone again when empty and unlocked."""
        if namespace not in self._roots:
            self._roots[namespace] = self._make_plain(None, namespace, [], [], start=0)
        return self._roots[namespace]

    def roots(self) -> list[PlainNode]:
        return list(self._roots.values())

    def find_root(self, namespace: str) -> PlainNode | None:
        return self._roots.get(namespace)

    def walk(self, node: PlainNode, token_ids: Sequence[int], max_blocks: int) -> Walk:
        """Follow `token_ids` from the end of `node` down to at most `max_blocks` blocks."""
        depth, block_ids = node.end, []
        while depth < max_blocks:
            child = node.children.get(self._key(token_ids, depth))
            if child is None:
                break
            num_same = self._num_same_blocks(child, token_ids, max_blocks)
            block_ids += child.block_ids[:num_same]
            node, depth = child, depth + num_same
            if depth < child.end:
                break
        return Walk(node, depth, block_ids)

    def find_atomic(
        self, walk: Walk, token_ids: Sequence[int], signature: str, max_len: int
    ) -> AtomicNode | None:
        """The atomic node along `walk` that covers the most of `token_ids`, at most `max_len`."""
        node = walk.node if walk.depth == walk.node.end else walk.node.parent
        best: AtomicNode | None = None
        while node is not None:
            for atomic in node.atomic_nodes:
                longest = 0 if best is None else best.logical_len
                if (
                    longest < atomic.logical_len <= max_len
                    and atomic.state.signature == signature
                    and atomic.spells(token_ids, node.end * self._block_size)
                ):
                    best = atomic
            node = node.parent
        return best

    def node_ending_at(self, node: PlainNode, depth: int) -> PlainNode:
        """The node on the way up from `node` that ends at `depth` blocks; may split an edge."""
        assert 0 <= depth <= node.end, f"depth {depth} asked of a path of {node.end} blocks"
        while depth <= node.start and node.parent is not None:
            node = node.parent
        return node if depth == node.end else self._split(node, depth - node.start)

    def add_blocks(
        self, node: PlainNode, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> PlainNode:
        """Hang `block_ids` behind `node`; `token_ids` starts at the root. Returns the new end."""
        tokens = list(token_ids[node.end * self._block_size :][: len(block_ids) * self._block_size])
        assert len(tokens) == len(block_ids) * self._block_size, f"{len(tokens)} tokens"
        child = self._make_plain(node, node.namespace, tokens, list(block_ids), start=node.end)
        key = self._key(tokens, 0)
        assert key not in node.children, f"tokens {key} are already behind this node"
        node.children[key] = child
        self._hold(child)
        self._sync(node)
        self._sync(child)
        return child

    def extend(self, node: PlainNode, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Lengthen a leaf's edge in place: a growing request should not leave a long chain."""
        assert node.is_leaf, "only an edge that ends in a leaf can grow"
        first = node.end * self._block_size
        node.tokens += token_ids[first : first + len(block_ids) * self._block_size]
        node.block_ids += block_ids
        for block_id in block_ids:
            self._pool.hold_for_node(block_id)
            self._holders.setdefault(block_id, []).append(node)

    def insert(
        self, namespace: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> PlainNode:
        """Make the tree spell the tokens of `block_ids`; what it already spells keeps its blocks.

        Returns the node that ends there.
        """
        walk = self.walk(self.root(namespace), token_ids, len(block_ids))
        node = self.node_ending_at(walk.node, walk.depth)
        if walk.depth < len(block_ids):
            node = self.add_blocks(node, token_ids, block_ids[walk.depth :])
        return node

    def insert_atomic(self, anchor: PlainNode, state: CompactedState) -> AtomicNode:
        """Hang a compacted state behind `anchor`, or return the node that already is its equal."""
        for atomic in anchor.atomic_nodes:
            if atomic.state.signature == state.signature and atomic.state.span == state.span:
                return atomic
        assert state.span, "a compacted state stands for at least one token"
        self.num_atomic_nodes += 1
        atomic = AtomicNode(
            parent=anchor,
            anchor=anchor.end,
            logical_len=anchor.end * self._block_size + len(state.span),
            state=state,
            serial=self._next_serial(),
            last_use=self._clock,
        )
        anchor.atomic_nodes.append(atomic)
        self._hold(atomic)
        self._sync(anchor)
        self._sync(atomic)
        return atomic

    def lock(self, node: Node) -> None:
        """Keep `node` and all before it from eviction."""
        for each in upwards(node):
            each.lock_count += 1
            self._sync(each)

    def unlock(self, node: Node) -> None:
        for each in list(upwards(node)):
            assert each.lock_count > 0, f"node {each.serial} has {each.lock_count} locks"
            each.lock_count -= 1
            self._sync(each)

    def touch(self, node: Node) -> None:
        """Mark `node` and all before it as used just now."""
        self._clock += 1
        for each in upwards(node):
            self._unlist(each)
            each.last_use = self._clock
            self._sync(each)

    def note_hit(self, node: Node) -> None:
        """Somebody goes on from `node`, and so from all before it."""
        for each in upwards(node):
            each.num_hits += 1

    def forget_hit(self, node: Node) -> None:
        """`note_hit` has proved wrong: nobody goes on from there."""
        for each in upwards(node):
            each.num_hits -= 1

    def contains(self, node: Node, namespace: str) -> bool:
        """False once `node` was evicted."""
        *_, top = upwards(node)
        return top is self._roots.get(namespace)

    def evict_oldest(self) -> bool:
        """Evict the least recently used unlocked leaf. False when there is none."""
        if not self._leaves:
            return False
        self._remove(self._leaves[0])
        return True

    def detach_block(self, block_id: int) -> None:
        """Evict all that holds this block, and what hangs below; none of it may be locked."""
        for node in list(self._holders.get(block_id, [])):
            if isinstance(node, PlainNode) and node.block_ids[0] != block_id:
                self._split(node, node.block_ids.index(block_id))
            self._remove_below(node)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before what hangs below them."""
        stack: list[PlainNode] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            yield from node.atomic_nodes
            stack.extend(node.children.values())

    def check_invariants(self) -> None:
        """Raise AssertionError unless structure, locks, leaf list and holds agree."""
        holders: dict[int, list[Node]] = {}
        counts = [0, 0]
        for node in self.nodes():
            counts[isinstance(node, AtomicNode)] += 1
            for block_id in node.block_ids:
                holders.setdefault(block_id, []).append(node)
            self._check_node(node)
        assert counts == [self.num_plain_nodes, self.num_atomic_nodes], f"{counts} nodes found"
        assert holders.keys() == self._holders.keys(), f"{sorted(holders)} held by nodes"
        for block_id, nodes in holders.items():
            self._check_holders(block_id, nodes)
        listed = sum(node.is_listed for node in self.nodes())
        assert listed == len(self._leaves), f"{listed} listed, {len(self._leaves)} in the list"

    def _check_node(self, node: Node) -> None:
        assert node.lock_count >= 0, f"node {node.serial} has {node.lock_count} locks"
        assert node.is_listed == self._is_evictable(node), f"leaf list is wrong on {node.serial}"
        assert node.is_listed == (node in self._leaves), f"leaf list is wrong on {node.serial}"
        if isinstance(node, AtomicNode):
            resident = node.state.resident_len - node.anchor * self._block_size
            room = len(node.block_ids) * self._block_size
            assert room - self._block_size < resident <= room, f"{resident} slots in {room}"
            return
        assert len(node.tokens) == len(node.block_ids) * self._block_size, f"{len(node.tokens)}"
        below: list[Node] = [*node.children.values(), *node.atomic_nodes]
        assert node.lock_count >= sum(each.lock_count for each in below), f"{node.serial} locks"
        for each in below:
            assert each.parent is node, f"node {each.serial} does not know its parent"
            assert each.last_use <= node.last_use, f"node {each.serial} is newer than its parent"
        for key, child in node.children.items():
            assert child.start == node.end, f"child starts at {child.start}, not at {node.end}"
            assert child.block_ids, f"child under {key} has no blocks"
            assert key == self._key(child.tokens, 0), f"child {child.tokens} under {key}"
        for atomic in node.atomic_nodes:
            assert atomic.anchor == node.end, f"anchored at {atomic.anchor}, not at {node.end}"
        if node.parent is None:
            assert node.lock_count or not node.is_leaf, f"empty root {node.namespace!r} is kept"

    def _check_holders(self, block_id: int, nodes: list[Node]) -> None:
        counted = self._pool.num_node_holds(block_id)
        known = self._holders[block_id]
        assert len(nodes) == counted == len(known), f"block {block_id}: {len(nodes)} of {counted}"
        assert all(any(node is each for each in known) for node in nodes), f"block {block_id}"
        num_plain = sum(isinstance(node, PlainNode) for node in nodes)
        # A compacted block is reachable only through atomic nodes, a plain one stands at one place.
        assert num_plain == 0 or len(nodes) == 1, f"block {block_id} is in {num_plain} plain nodes"
        if any(node.lock_count for node in nodes):
            holds = self._pool.num_table_holds(block_id)
            assert holds > 0, f"block {block_id} is locked, yet {holds} tables hold it"

    def _split(self, node: PlainNode, num_blocks: int) -> PlainNode:
        """Cut an edge. `node` stays the lower part, with what hangs on it; returns the upper."""
        assert 0 < num_blocks < len(node.block_ids), f"{num_blocks} of {len(node.block_ids)} blocks"
        assert node.parent is not None, "a root has no edge to split"
        num_tokens = num_blocks * self._block_size
        upper = self._make_plain(
            node.parent,
            node.namespace,
            node.tokens[:num_tokens],
            node.block_ids[:num_blocks],
            start=node.start,
        )
        upper.lock_count, upper.last_use = node.lock_count, node.last_use
        upper.num_hits = node.num_hits
        node.parent.children[self._key(upper.tokens, 0)] = upper
        node.parent, node.start = upper, upper.end
        node.tokens, node.block_ids = node.tokens[num_tokens:], node.block_ids[num_blocks:]
        upper.children[self._key(node.tokens, 0)] = node
        for block_id in upper.block_ids:
            holders = self._holders[block_id]
            holders[holders.index(node)] = upper
        return upper

    def _remove_below(self, node: Node) -> None:
        """Evict `node` and all that hangs below it, leaves first."""
        below, stack = [], [node]
        while stack:
            each = stack.pop()
            below.append(each)
            if isinstance(each, PlainNode):
                stack += [*each.children.values(), *each.atomic_nodes]
        for each in reversed(below):
            self._remove(each)

    def _remove(self, node: Node) -> None:
        assert node.lock_count == 0, f"node {node.serial} has {node.lock_count} locks"
        assert node.is_leaf, f"node {node.serial} has others below it"
        parent = node.parent
        assert parent is not None, "roots leave by themselves"
        self._unlist(node)
        if isinstance(node, AtomicNode):
            parent.atomic_nodes.remove(node)
            self.num_atomic_nodes -= 1
        else:
            del parent.children[self._key(node.tokens, 0)]
            self.num_plain_nodes -= 1
        node.parent = None
        for block_id in node.block_ids:
            self._holders[block_id].remove(node)
            if not self._holders[block_id]:
                del self._holders[block_id]
            self._pool.release_for_node(block_id)
        self._sync(parent)

    def _hold(self, node: Node) -> None:
        for block_id in node.block_ids:
            self._pool.hold_for_node(block_id)
            self._holders.setdefault(block_id, []).append(node)

    def _is_evictable(self, node: Node) -> bool:
        return node.lock_count == 0 and node.is_leaf and node.parent is not None

    def _sync(self, node: Node) -> None:
        """List or unlist a node whose locks or children changed; drop a root nobody needs."""
        if self._is_evictable(node):
            if not node.is_listed:
                self._leaves.add(node)
                node.is_listed = True
            return
        self._unlist(node)
        if node.lock_count == 0 and node.is_leaf and isinstance(node, PlainNode):
            # Only a root gets here: other unlocked leaves are evictable.
            del self._roots[node.namespace]
            self.num_plain_nodes -= 1

    def _unlist(self, node: Node) -> None:
        if node.is_listed:
            self._leaves.remove(node)
            node.is_listed = False

    def _make_plain(
        self,
        parent: PlainNode | None,
        namespace: str,
        tokens: list[int],
        block_ids: list[int],
        *,
        start: int,
    ) -> PlainNode:
        self.num_plain_nodes += 1
        return PlainNode(
            parent=parent,
            namespace=namespace,
            tokens=tokens,
            block_ids=block_ids,
            start=start,
            serial=self._next_serial(),
            last_use=self._clock,
        )

    def _next_serial(self) -> int:
        self._num_made += 1
        return self._num_made

    def _key(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        """The tokens of block `index` of `token_ids`."""
        first = index * self._block_size
        return tuple(token_ids[first : first + self._block_size])

    def _num_same_blocks(self, node: PlainNode, token_ids: Sequence[int], max_blocks: int) -> int:
        """Leading blocks of an edge that `token_ids` spells, not past `max_blocks` of the path."""
        size = self._block_size
        num_blocks = min(len(node.block_ids), max_blocks - node.start)
        first, num_tokens = node.start * size, num_blocks * size
        tokens = list(token_ids[first : first + num_tokens])
        if tokens == node.tokens[:num_tokens]:
            return num_blocks
        return next(
            i for i in range(num_blocks) if self._key(tokens, i) != self._key(node.tokens, i)
        )


def upwards(node: Node) -> Iterator[Node]:
    """`node`, its parent, and so on to the root."""
    yield node
    above = node.parent
    while above is not None:
        yield above
        above = above.parent
