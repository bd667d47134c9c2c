"""Examples for the radix tree. Knows nothing of block tables."""

import pytest

from zipage_lang.radix_cache.block_pool import BlockPool
from zipage_lang.radix_cache.radix_tree import CompactedState, PlainNode, RadixTree


class World:
    """A pool and a tree of two-token blocks; tables let go of what was inserted."""

    def __init__(self) -> None:
        self.pool = BlockPool(10)
        self.tree = RadixTree(self.pool, 2)

    def insert(self, token_ids: list[int], namespace: str = "") -> PlainNode:
        block_ids = self.pool.allocate(len(token_ids) // 2)
        node = self.tree.insert(namespace, token_ids, block_ids)
        self.tree.touch(node)
        for block_id in block_ids:
            self.pool.release_for_table(block_id)
        return node

    def insert_atomic(self, anchor: PlainNode, span: tuple[int, ...], signature: str = "sig"):
        block_ids = self.pool.allocate(1)
        state = CompactedState(
            span=span,
            signature=signature,
            block_ids=tuple(block_ids),
            resident_len=anchor.end * 2 + 2,
            stateful_len=0,
            plain_len=anchor.end * 2,
            compacted_len=anchor.end * 2 + 2,
        )
        atomic = self.tree.insert_atomic(anchor, state)
        self.pool.release_for_table(block_ids[0])
        return atomic

    def found(self, token_ids: list[int], namespace: str = "") -> list[int]:
        root = self.tree.find_root(namespace)
        walk = self.tree.walk(root, token_ids, len(token_ids) // 2) if root else None
        return walk.block_ids if walk else []

    def freed_by_evicting(self) -> list[int]:
        before = set(self.pool._free)
        assert self.tree.evict_oldest()
        self.tree.check_invariants()
        return sorted(set(self.pool._free) - before)


@pytest.fixture
def world() -> World:
    return World()


def test_what_was_inserted_is_found_block_by_block(world):
    world.insert([1, 2, 3, 4, 5, 6])
    assert world.found([1, 2, 3, 4, 5, 6]) == [1, 2, 3]
    assert world.found([1, 2, 3, 4, 9, 9]) == [1, 2]
    assert world.found([1, 2, 3]) == [1]
    assert world.found([1, 9, 3, 4]) == []


def test_second_branch_splits_the_edge_and_shares_its_head(world):
    lower = world.insert([1, 2, 3, 4, 5, 6])
    world.insert([1, 2, 7, 8])
    assert lower.tokens == [3, 4, 5, 6]
    assert lower.parent.block_ids == [1]
    assert world.found([1, 2, 7, 8]) == [1, 5]
    assert world.pool.num_free == 6  # block 4, a second copy of block 1, came home
    world.tree.check_invariants()


def test_namespaces_do_not_see_each_other(world):
    world.insert([1, 2], namespace="a")
    assert world.found([1, 2], namespace="b") == []
    assert world.found([1, 2], namespace="a") == [1]


def test_evict_takes_the_least_recently_used_leaf_first(world):
    first = world.insert([1, 2])  # block 1
    world.insert([3, 4])  # block 2
    world.insert([5, 6])  # block 3
    world.tree.touch(first)
    assert [world.freed_by_evicting() for _ in range(3)] == [[2], [3], [1]]
    assert not world.tree.evict_oldest()


def test_evict_takes_leaves_before_the_node_they_hang_on(world):
    world.insert([1, 2, 3, 4])
    world.insert([1, 2, 5, 6])  # blocks 1 | 2 and 1 | 4 (3 came home)
    assert [world.freed_by_evicting() for _ in range(3)] == [[2], [4], [1]]


def test_evict_skips_locked_leaf_and_all_above_it(world):
    locked = world.insert([1, 2, 3, 4])
    world.insert([1, 2, 5, 6])
    world.pool.hold_for_table(1)
    world.pool.hold_for_table(2)
    world.tree.lock(locked)
    assert world.freed_by_evicting() == [4]
    assert not world.tree.evict_oldest()
    world.tree.unlock(locked)
    assert world.tree.evict_oldest()


def test_split_keeps_locks_and_atomic_nodes_where_they_were(world):
    node = world.insert([1, 2, 3, 4])
    atomic = world.insert_atomic(node, (5, 6, 7))
    world.tree.lock(atomic)
    upper = world.tree.node_ending_at(node, 1)
    assert upper is node.parent
    assert (upper.lock_count, node.lock_count, atomic.lock_count) == (1, 1, 1)
    assert node.atomic_nodes == [atomic]
    assert (atomic.anchor, node.end, upper.end) == (2, 2, 1)


def test_atomic_node_is_found_only_whole_and_with_its_signature(world):
    node = world.insert([1, 2])
    atomic = world.insert_atomic(node, (3, 4, 5))
    tokens = [1, 2, 3, 4, 5, 6]
    walk = world.tree.walk(world.tree.root(""), tokens, 3)
    assert world.tree.find_atomic(walk, tokens, "sig", 5) is atomic
    assert world.tree.find_atomic(walk, tokens, "other", 5) is None
    assert world.tree.find_atomic(walk, tokens, "sig", 4) is None
    other = [1, 2, 3, 9, 5, 6]
    assert world.tree.find_atomic(walk, other, "sig", 5) is None


def test_longest_of_several_atomic_nodes_is_found(world):
    node = world.insert([1, 2])
    world.insert_atomic(world.tree.root(""), (1, 2, 3))
    longest = world.insert_atomic(node, (3, 4, 5))
    world.insert_atomic(node, (3, 4))
    tokens = [1, 2, 3, 4, 5, 6]
    walk = world.tree.walk(world.tree.root(""), tokens, 3)
    assert world.tree.find_atomic(walk, tokens, "sig", 5) is longest


def test_atomic_node_is_not_found_from_the_middle_of_its_anchor_edge(world):
    world.insert_atomic(world.insert([1, 2, 3, 4]), (5, 6, 7))
    tokens = [1, 2, 9, 9, 5, 6, 7, 8]
    walk = world.tree.walk(world.tree.root(""), tokens, 4)
    assert walk.depth == 1
    assert world.tree.find_atomic(walk, tokens, "sig", 7) is None


def test_equal_compacted_state_is_stored_once(world):
    node = world.insert([1, 2])
    assert world.insert_atomic(node, (3,)) is world.insert_atomic(node, (3,))
    assert world.tree.num_atomic_nodes == 1
    assert world.pool.num_tree_only == 2


def test_anchor_is_evicted_only_after_its_atomic_node(world):
    node = world.insert([1, 2])
    world.insert_atomic(node, (3, 4, 5))
    assert [world.freed_by_evicting() for _ in range(2)] == [[2], [1]]


def test_detaching_a_block_splits_there_and_evicts_all_below(world):
    node = world.insert([1, 2, 3, 4, 5, 6])  # blocks 1 2 3
    world.insert_atomic(node, (7, 8))  # block 4
    world.pool.hold_for_table(2)
    world.tree.detach_block(2)
    assert world.found([1, 2, 3, 4, 5, 6]) == [1]
    assert sorted(world.pool._free)[:2] == [3, 4]
    assert world.pool.num_node_holds(2) == 0
    assert world.pool.num_table_holds(2) == 1
    world.tree.check_invariants()


def test_detaching_is_refused_while_something_there_is_locked(world):
    node = world.insert([1, 2, 3, 4])
    world.tree.lock(node)
    with pytest.raises(AssertionError, match="1 locks"):
        world.tree.detach_block(1)
    assert world.found([1, 2, 3, 4]) == [1, 2]


def test_leaf_grows_in_place(world):
    node = world.insert([1, 2])
    block_ids = world.pool.allocate(1)
    world.tree.extend(node, [1, 2, 3, 4], block_ids)
    assert world.found([1, 2, 3, 4]) == [1, 2]
    assert world.tree.num_plain_nodes == 2  # the root and one edge


def test_empty_unlocked_root_goes_away(world):
    world.insert([1, 2], namespace="a")
    assert world.tree.evict_oldest()
    assert world.tree.find_root("a") is None
    assert list(world.tree.nodes()) == []


def test_unlocking_what_is_not_locked_is_refused(world):
    node = world.insert([1, 2])
    with pytest.raises(AssertionError, match="0 locks"):
        world.tree.unlock(node)


def test_invariants_notice_a_wrong_lock_count(world):
    node = world.insert([1, 2])
    node.lock_count = 1
    with pytest.raises(AssertionError):
        world.tree.check_invariants()
