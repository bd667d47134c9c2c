"""Random histories of the prefix cache in a tiny world, with the content of every slot tracked.

Knows nothing of how the cache works inside, except where the oracle walks its tree.

Each slot of each block stores a value that says what was computed there. In a plain table slot i
stores (namespace, all tokens up to i), so two slots are equal exactly when a real KV cache could
share them. What is computed on top of a compacted state is like nothing else: a number of its own.
"""

import dataclasses
import itertools
import random
from collections.abc import Hashable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zipage_lang.radix_cache.block_table import BlockTable, CompactionBlocks, SwappedTable
from zipage_lang.radix_cache.prefix_cache import PrefixCache
from zipage_lang.radix_cache.radix_tree import AtomicNode, PlainNode

NAMESPACES = st.sampled_from(["a", "b"])
SIGNATURES = st.sampled_from(["wide", "tight"])
TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=9)
PICKS = st.integers(0, 1000)
MAX_BRANCHES = 6
GARBAGE = "garbage"


@dataclasses.dataclass
class Branch:
    """What the oracle knows of one open table."""

    table: BlockTable
    tokens: list[int]  # computed so far
    todo: list[int]  # known, not yet computed
    slots: list[Hashable]  # what its resident slots must store
    planned: CompactionBlocks | None = None
    num_keep: int = 0


@dataclasses.dataclass(frozen=True)
class Swapped:
    """A branch in host memory."""

    branch: Branch
    record: SwappedTable


class CacheMachine(RuleBasedStateMachine):
    block_size = 2
    num_blocks = 10

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(self.num_blocks, self.block_size)
        self.memory = [[GARBAGE] * self.block_size for _ in range(self.num_blocks + 1)]
        self.branches: list[Branch] = []
        self.swapped: list[Swapped] = []
        self.closed: set[Hashable] = set()  # compacted states that were left in the tree
        self.history: list[tuple[str, tuple[int, ...]]] = []
        self.unique = itertools.count()

    # -- rules

    @precondition(lambda self: len(self.branches) < MAX_BRANCHES)
    @rule(namespace=NAMESPACES, tokens=TOKENS, signature=st.none() | SIGNATURES)
    def prefill(self, namespace: str, tokens: list[int], signature: str | None) -> None:
        self.prefill_and_commit(self.open(namespace, tokens, signature))

    @precondition(lambda self: len(self.branches) < MAX_BRANCHES)
    @rule(namespace=NAMESPACES, tokens=TOKENS, num_computed=st.integers(1, 6))
    def prefill_a_chunk(self, namespace: str, tokens: list[int], num_computed: int) -> None:
        branch = self.open(namespace, tokens, None)
        self.compute(branch, branch.todo[:num_computed])

    @precondition(lambda self: self.history and len(self.branches) < MAX_BRANCHES)
    @rule(pick=PICKS, more=TOKENS, signature=SIGNATURES)
    def open_again(self, pick: int, more: list[int], signature: str) -> None:
        namespace, tokens = self.history[pick % len(self.history)]
        self.prefill_and_commit(self.open(namespace, [*tokens, *more], signature))

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, new_tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, pick: int, new_tokens: list[int]) -> None:
        branch = self.pick(pick)
        known = branch.todo[: len(new_tokens)]
        self.compute(branch, known or new_tokens)

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, holding_back=st.integers(0, 3))
    def commit(self, pick: int, holding_back: int) -> None:
        branch = self.pick(pick)
        num_tokens = max(0, len(branch.tokens) - holding_back)
        self.cache.commit(branch.table, branch.tokens + branch.todo, num_tokens)

    @precondition(lambda self: self.idle() and len(self.branches) < MAX_BRANCHES)
    @rule(pick=PICKS)
    def fork(self, pick: int) -> None:
        branch = self.pick(pick)
        table = self.cache.fork(branch.table)
        self.branches.append(
            Branch(table, list(branch.tokens), list(branch.todo), list(branch.slots))
        )

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, protect=PICKS, keep=PICKS)
    def plan_compaction(self, pick: int, protect: int, keep: int) -> None:
        branch = self.pick(pick)
        protected_len = protect % (len(branch.slots) + 1)
        num_keep = keep % (len(branch.slots) - protected_len + 1)
        before = list(branch.table.block_ids)
        planned = self.cache.plan_compaction(branch.table, protected_len, num_keep)
        assert branch.table.block_ids == before
        if planned is None:
            return
        first = protected_len // self.block_size
        assert planned.block_ids[:first] == tuple(before[:first])
        changed = dict(planned.copies)
        for old, new in zip(before, planned.block_ids, strict=False):
            assert changed.get(old, old) == new
        branch.planned, branch.num_keep = planned, num_keep

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, protect=PICKS, keep=PICKS, seed=PICKS)
    def compact(self, pick: int, protect: int, keep: int, seed: int) -> None:
        branch = self.pick(pick)
        self.plan_compaction(pick, protect, keep)
        if branch.planned is not None:
            self.finish(branch, seed)

    @precondition(lambda self: self.compacting())
    @rule(pick=PICKS, seed=PICKS)
    def finish_compaction(self, pick: int, seed: int) -> None:
        self.finish(self.pick_compacting(pick), seed)

    def finish(self, branch: Branch, seed: int) -> None:
        planned = branch.planned
        assert planned is not None
        self.copy(planned.copies)
        protected_len = planned.protected_len
        tail = branch.slots[protected_len:]
        survivors = random.Random(seed).sample(tail, branch.num_keep)
        branch.slots = branch.slots[:protected_len] + survivors
        for slot in range(protected_len, len(branch.slots)):
            self.write(planned.block_ids, slot, branch.slots[slot])
        self.cache.finish_compaction(branch.table, planned, resident_len=len(branch.slots))
        branch.planned = None
        assert branch.table.is_compacted
        assert branch.table.block_ids == list(planned.block_ids)

    @precondition(lambda self: self.compacting())
    @rule(pick=PICKS)
    def cancel_compaction_before_it_ran(self, pick: int) -> None:
        branch = self.pick_compacting(pick)
        assert branch.planned is not None
        self.cache.cancel_compaction(branch.table, branch.planned)
        branch.planned = None

    @precondition(lambda self: self.compacting())
    @rule(pick=PICKS)
    def abort_compaction_half_way(self, pick: int) -> None:
        branch = self.pick_compacting(pick)
        assert branch.planned is not None
        for block_id in branch.planned.block_ids[branch.planned.protected_len // self.block_size :]:
            self.memory[block_id] = [GARBAGE] * self.block_size
        self.cache.cancel_compaction(branch.table, branch.planned)
        self.cache.drop(branch.table)
        self.branches.remove(branch)

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, num_tokens=st.integers(0, 4))
    def truncate(self, pick: int, num_tokens: int) -> None:
        self.take_off(self.pick(pick), num_tokens)

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, num_tokens=st.integers(1, 4))
    def go_another_way(self, pick: int, num_tokens: int) -> None:
        branch = self.pick(pick)
        self.cache.commit(branch.table, branch.tokens, len(branch.tokens))
        self.take_off(branch, num_tokens)
        branch.todo = [1 - token for token in branch.todo]
        self.compute(branch, branch.todo[:num_tokens])

    def take_off(self, branch: Branch, num_tokens: int) -> None:
        lowest = branch.table.compacted_len if branch.table.is_compacted else 0
        num_tokens = min(num_tokens, len(branch.slots) - lowest)
        self.cache.truncate(branch.table, num_tokens)
        if num_tokens:
            branch.todo = branch.tokens[-num_tokens:] + branch.todo
            del branch.tokens[-num_tokens:], branch.slots[-num_tokens:]

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, signature=st.none() | SIGNATURES, stateful_len=st.integers(0, 9))
    def close(self, pick: int, signature: str | None, stateful_len: int) -> None:
        self.leave(self.pick(pick), signature, stateful_len)

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS, signature=SIGNATURES, more=TOKENS, num_branches=st.integers(1, 3))
    def next_turn(self, pick: int, signature: str, more: list[int], num_branches: int) -> None:
        branch = max(self.idle(), key=lambda branch: branch.table.is_compacted)
        if not branch.table.is_compacted:
            branch = self.pick(pick)
        namespace, tokens = branch.table.namespace, list(branch.tokens)
        self.leave(branch, signature, stateful_len=len(more))
        branches = [self.open(namespace, tokens + more, signature) for _ in range(num_branches)]
        self.prefill_and_commit(branches[-1])

    def leave(self, branch: Branch, signature: str | None, stateful_len: int) -> None:
        table, tokens = branch.table, branch.tokens
        self.history.append((table.namespace, tuple(tokens)))
        if table.is_compacted:
            key = (table.namespace, signature, tuple(tokens))
            self.closed.add((key, tuple(branch.slots), stateful_len))
        self.branches.remove(branch)
        namespace, was_compacted = table.namespace, table.is_compacted
        self.cache.close(table, tokens, signature=signature, stateful_len=stateful_len)
        assert not table.is_open
        # What was just closed is found again, all of it.
        match = self.cache.match([*tokens, 0], namespace=namespace, signature=signature)
        if not was_compacted:
            assert match.num_tokens >= len(tokens) - len(tokens) % self.block_size
        elif signature is not None:
            assert match.num_tokens == len(tokens)

    @precondition(lambda self: self.idle())
    @rule(pick=PICKS)
    def drop(self, pick: int) -> None:
        branch = self.pick(pick)
        nodes = len(list(self.cache._tree.nodes()))
        self.branches.remove(branch)
        self.cache.drop(branch.table)
        assert len(list(self.cache._tree.nodes())) <= nodes

    @precondition(lambda self: self.idle() and not self.swapped)
    @rule(pick=PICKS)
    def swap_out(self, pick: int) -> None:
        branch = self.pick(pick)
        self.branches.remove(branch)
        self.swapped.append(Swapped(branch, self.cache.swap_out(branch.table)))

    @precondition(lambda self: self.swapped)
    @rule(pick=PICKS)
    def swap_in(self, pick: int) -> None:
        swapped = self.swapped[pick % len(self.swapped)]
        tokens, record = swapped.branch.tokens, swapped.record
        known = tokens[: record.plain_len + 1]
        found = self.cache.match(known, namespace=record.namespace, signature=None).block_ids
        num_idle = sum(self.cache._pool.num_table_holds(block_id) == 0 for block_id in found)
        num_left = self.cache.num_available - num_idle
        table = self.cache.swap_in(record, tokens)
        assert (table is None) == (record.num_blocks - len(found) > num_left)
        if table is None:
            return
        assert table.num_prefix_blocks == len(found)
        self.swapped.remove(swapped)
        branch = dataclasses.replace(swapped.branch, table=table)
        for slot, value in enumerate(branch.slots):
            if slot >= len(found) * self.block_size:
                self.write(table.block_ids, slot, value)
        self.branches.append(branch)

    @precondition(lambda self: self.cache.num_free < 2)
    @rule()
    def flush(self) -> None:
        num_available, num_free = self.cache.num_available, self.cache.num_free
        assert self.cache.flush() == num_available - num_free
        assert self.cache.num_free == self.cache.num_available == num_available

    # -- laws

    @invariant()
    def laws_hold(self) -> None:
        self.cache.check_invariants([branch.table for branch in self.branches])
        self.cache.check_invariants()

    @invariant()
    def tables_read_what_they_wrote(self) -> None:
        for branch in self.branches:
            assert branch.table.logical_len == len(branch.tokens)
            assert self.read(branch.table.block_ids, len(branch.slots)) == branch.slots

    @invariant()
    def tree_stores_what_it_spells(self) -> None:
        for node in self.cache._tree.nodes():
            tokens, block_ids = self.spelled(node)
            namespace = self.namespace_of(node)
            if isinstance(node, PlainNode):
                wanted = [(namespace, tuple(tokens[: i + 1])) for i in range(len(tokens))]
                assert self.read(block_ids, len(tokens)) == wanted
            else:
                slots = tuple(self.read(block_ids, node.state.resident_len))
                key = (namespace, node.state.signature, tuple(tokens))
                assert (key, slots, node.state.stateful_len) in self.closed

    @invariant()
    def forget_free_blocks(self) -> None:
        pool = self.cache._pool
        for block_id in range(1, self.num_blocks + 1):
            if pool.num_table_holds(block_id) + pool.num_node_holds(block_id) == 0:
                self.memory[block_id] = [GARBAGE] * self.block_size

    # -- how the oracle acts

    def idle(self) -> list[Branch]:
        return [branch for branch in self.branches if branch.planned is None]

    def compacting(self) -> list[Branch]:
        return [branch for branch in self.branches if branch.planned is not None]

    def pick(self, pick: int) -> Branch:
        return self.idle()[pick % len(self.idle())]

    def pick_compacting(self, pick: int) -> Branch:
        return self.compacting()[pick % len(self.compacting())]

    def open(self, namespace: str, tokens: list[int], signature: str | None) -> Branch:
        match = self.cache.match(tokens, namespace=namespace, signature=signature)
        assert match.num_tokens == self.best_match_len(namespace, tokens, signature)
        slots = self.read(match.block_ids, match.resident_len)
        known = tuple(tokens[: match.num_tokens])
        if match.is_compacted:
            assert ((namespace, signature, known), tuple(slots), match.stateful_len) in self.closed
        else:
            assert slots == [(namespace, known[: i + 1]) for i in range(len(known))]
        table = self.cache.open(match)
        assert table.block_ids == list(match.block_ids)
        branch = Branch(table, list(known), tokens[match.num_tokens :], slots)
        self.branches.append(branch)
        return branch

    def prefill_and_commit(self, branch: Branch) -> None:
        if self.compute(branch, branch.todo):
            self.cache.commit(branch.table, branch.tokens, len(branch.tokens))

    def compute(self, branch: Branch, tokens: list[int]) -> bool:
        table, cache = branch.table, self.cache
        num_new, num_free = cache.num_new_blocks(table, len(tokens)), cache.num_free
        num_available, before = cache.num_available, list(table.block_ids)
        appended = cache.append(table, len(tokens))
        assert (appended is None) == (num_new > num_available)
        if appended is None:
            assert (table.block_ids, cache.num_free) == (before, num_free)
            return False
        assert len(appended.block_ids) == num_new
        assert [*before[: appended.first], *appended.block_ids] == table.block_ids
        self.copy([] if appended.copy is None else [appended.copy])
        for token in tokens:
            branch.tokens.append(token)
            plain = (table.namespace, tuple(branch.tokens))
            branch.slots.append(next(self.unique) if table.is_compacted else plain)
            self.write(table.block_ids, len(branch.slots) - 1, branch.slots[-1])
        branch.todo = branch.todo[len(tokens) :]
        return True

    def best_match_len(self, namespace: str, tokens: list[int], signature: str | None) -> int:
        """By trying every node of the tree."""
        best = 0
        for node in self.cache._tree.nodes():
            if self.namespace_of(node) != namespace:
                continue
            spelled, _ = self.spelled(node)
            if isinstance(node, AtomicNode):
                if node.state.signature == signature and tokens[: len(spelled)] == spelled:
                    best = max(best, len(spelled) if len(spelled) < len(tokens) else 0)
                continue
            for end in range(0, min(len(spelled), len(tokens) - 1) + 1, self.block_size):
                if tokens[:end] == spelled[:end]:
                    best = max(best, end)
        return best

    def spelled(self, node: PlainNode | AtomicNode) -> tuple[list[int], list[int]]:
        """All tokens and blocks from the root to the end of `node`."""
        own = node.tokens if isinstance(node, PlainNode) else list(node.state.span)
        if node.parent is None:
            return list(own), list(node.block_ids)
        tokens, block_ids = self.spelled(node.parent)
        return tokens + list(own), block_ids + list(node.block_ids)

    def namespace_of(self, node: PlainNode | AtomicNode) -> str:
        return node.namespace if isinstance(node, PlainNode) else self.namespace_of(node.parent)

    def read(self, block_ids: list[int] | tuple[int, ...], num_slots: int) -> list[Hashable]:
        size = self.block_size
        return [self.memory[block_ids[slot // size]][slot % size] for slot in range(num_slots)]

    def write(self, block_ids: list[int] | tuple[int, ...], slot: int, value: Hashable) -> None:
        self.memory[block_ids[slot // self.block_size]][slot % self.block_size] = value

    def copy(self, copies: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> None:
        for src, dst in copies:
            self.memory[dst] = list(self.memory[src])

    def teardown(self) -> None:
        for branch in self.branches:
            if branch.planned is not None:
                self.cache.cancel_compaction(branch.table, branch.planned)
            self.cache.drop(branch.table)
        self.cache.flush()
        assert self.cache.num_free == self.num_blocks
        assert list(self.cache._tree.nodes()) == []


class OneSlotBlocks(CacheMachine):
    block_size = 1
    num_blocks = 14


class ThreeSlotBlocks(CacheMachine):
    block_size = 3
    num_blocks = 7


SETTINGS = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestBlocksOfTwo = CacheMachine.TestCase
TestBlocksOfOne = OneSlotBlocks.TestCase
TestBlocksOfThree = ThreeSlotBlocks.TestCase
TestBlocksOfTwo.settings = TestBlocksOfOne.settings = TestBlocksOfThree.settings = SETTINGS
