"""Which requests compact and how much they keep: counts only.

Knows nothing of scores, tensors or what a policy prefers.
"""

import hashlib
from array import array

from zipage_lang.runtime.plan_builder import PlanBuilder, PlannedCompaction
from zipage_lang.runtime.request import Request, Status
from zipage_lang.runtime.scheduler_state import SchedulerState
from zipage_lang.runtime.snapshot import CompactionView
from zipage_lang.runtime.step_plan import BlockCopy, Compaction

UNBOUNDED = 2**62
WORTHWHILE = 4  # an early compaction frees at least this fraction of the interval


class CompactionPlanner:
    """`room` bounds how far a request grows; `is_due` and `can_compact_early`: when it shrinks."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._num_planned = 0
        self._is_strict = state.limits.deterministic

    def room(self, request: Request) -> int:
        """Tokens the request may still compute before it must compact or get a query slot.

        Half-open in resident slots: [0, protected) [protected, protected + K) [.., + E) due.
        A request that scores with queries but has too few of them yet (it continued from a
        compacted state near its bound) may run on until it has `min(window, block_size)`, at most
        by one block.
        """
        if request.kv.mode != "fixed":
            return UNBOUNDED
        if self._lacks_slot(request):
            return request.query_line - request.resident_len
        bound = request.kv.protected_len + request.kv.max_tail_len
        overshoot = bound + self._state.block_size - request.resident_len
        return max(bound - request.resident_len, min(self._num_missing_queries(request), overshoot))

    def growth_left(self, request: Request) -> int:
        """Slots the request may still come to hold on top of what it holds."""
        num_tokens = request.num_prompt_tokens + request.sampling.max_tokens
        growth = num_tokens - request.logical_len
        if request.kv.mode != "fixed":
            return growth
        bound = request.kv.protected_len + request.kv.max_tail_len
        return min(growth, bound - request.resident_len)

    def is_due(self, request: Request) -> bool:
        """Whether the request must compact before it can go on."""
        bound = request.kv.protected_len + request.kv.max_tail_len
        if request.kv.mode != "fixed" or request.resident_len < bound:
            return False
        if not request.needs_queries:
            return True
        if request.resident_len >= bound + self._state.block_size:
            return self._state.slots.num_queries(request) > 0
        return self._num_missing_queries(request) == 0

    def can_resume(self, request: Request, resident_len: int) -> bool:
        """Whether the request could go on from a state of that length with no query in its ring.

        It needs room for the tokens whose queries let it compact; in strict mode for all of them,
        so that it compacts when and as it would have anyway. What may not go on is computed again.
        """
        return resident_len < self.longest_start(request)

    def longest_start(self, request: Request) -> int:
        """Resident slots that a request may never be asked to start behind."""
        if not request.needs_queries:
            return UNBOUNDED
        if request.kv.mode == "fixed":
            if self._is_strict:
                return request.query_line + 1
            bound = request.kv.protected_len + request.kv.max_tail_len
            return bound + self._state.block_size
        whole_blocks = self._state.limits.num_blocks - 1  # one may go to a copy of the last block
        wanted = min(self._state.limits.window, request.kv.interval)
        return max(1, whole_blocks * self._state.block_size - wanted + 1)

    def can_compact_early(self, request: Request) -> bool:
        """Whether compacting now, before it is due, would free a block, and enough to be worth it.

        On a card, compactions that free a block or two each cost more time than they give room.
        Never in strict mode: when blocks are short is the others' doing.
        """
        if self._is_strict:
            return False
        if not request.kv.compacts or request.status is not Status.RUNNING:
            return False
        if request.tail_len <= request.kv.budget or self._lacks_slot(request):
            return False
        if request.needs_queries:
            since = request.logical_len - request.last_compaction_at
            wanted = min(self._state.limits.window, request.kv.interval)
            if min(since, self._state.slots.num_queries(request)) < wanted:
                return False
        num_freed = self._num_blocks(request, request.tail_len) - self._num_blocks(
            request, self._num_keep(request)
        )
        worth_it = request.kv.interval // (WORTHWHILE * self._state.block_size)
        return num_freed >= max(1, worth_it)

    def plan(self, request: Request, plan: PlanBuilder) -> bool:
        """Put the compaction into the step. False when blocks for private copies are short."""
        return self._plan(request, plan, self._num_keep(request))

    def plan_in_place(self, request: Request, plan: PlanBuilder) -> bool:
        """As `plan`, but only if it needs no new blocks, so that it surely frees some."""
        table, num_keep = request.table, self._num_keep(request)
        assert table is not None
        blocks = self._state.cache.plan_compaction(table, request.kv.protected_len, num_keep)
        if blocks is None:
            return False
        self._state.cache.cancel_compaction(table, blocks)
        return not blocks.copies and self._plan(request, plan, num_keep)

    def finish(self, ident: int) -> None:
        """A compaction is done: switch the table, count. Its request may have ended meanwhile."""
        planned = self._state.compacting.pop(ident)
        request, compaction = planned.request, planned.compaction
        assert request.table is not None
        if request.status is not Status.COMPACTING:
            self._part(planned)
            return
        resident_len = compaction.protected_len + compaction.num_keep
        self._state.cache.finish_compaction(
            request.table, planned.blocks, resident_len=resident_len
        )
        num_dropped = compaction.tail_len - compaction.num_keep
        request.status = Status.RUNNING
        request.stateful_len = compaction.num_keep
        request.last_compaction_at = request.logical_len
        request.compactions += 1
        request.dropped += num_dropped
        self._state.counts.num_compactions += 1
        self._state.counts.num_dropped_slots += num_dropped
        self._state.recent_compactions.append(
            CompactionView(
                number=self._state.counts.num_compactions,
                arrival=request.arrival,
                sample_index=request.sample_index,
                logical_len=request.logical_len,
                resident_before=resident_len + num_dropped,
                resident_after=resident_len,
            )
        )

    def _part(self, planned: PlannedCompaction) -> None:
        """What the tail held was in flux when the request ended: only the blocks come back."""
        request = planned.request
        assert request.table is not None
        self._state.cache.cancel_compaction(request.table, planned.blocks)
        self._state.parting.remove(request)
        self._state.drop_blocks(request)

    def _plan(self, request: Request, plan: PlanBuilder, num_keep: int) -> bool:
        table, protected_len = request.table, request.kv.protected_len
        assert table is not None
        assert request.row is not None
        blocks = self._state.cache.plan_compaction(table, protected_len, num_keep)
        if blocks is None:
            return False
        if self._is_strict:
            self._assert_on_time(request)
        self._num_planned += 1
        compaction = Compaction(
            ident=self._num_planned,
            row=request.row,
            policy=request.kv.policy,
            protected_len=protected_len,
            tail_len=request.tail_len,
            num_keep=num_keep,
            stateful_len=request.stateful_len,
            logical_len=request.logical_len,
            query_slot=request.query_slot,
            num_queries=self._state.slots.num_queries(request),
            seed=self._seed(request),
            block_ids_before=tuple(blocks.block_ids_before),
            block_ids=tuple(blocks.block_ids),
            block_copies=tuple(BlockCopy(src, dst) for src, dst in blocks.copies),
        )
        request.status = Status.COMPACTING
        planned = PlannedCompaction(request, blocks, compaction)
        self._state.compacting[compaction.ident] = planned
        plan.add_compaction(planned)
        return True

    def _seed(self, request: Request) -> int:
        """A fresh draw each time. In strict mode not of the request's own seed: who continues from
        another's compacted state, of the same protected tokens, must find what it would have made.
        """
        root = request.seed
        if self._is_strict:
            tokens = array("q", request.token_ids[: request.kv.protected_len]).tobytes()
            root = int.from_bytes(hashlib.sha256(tokens).digest()[:8], "little")
        return (root + request.logical_len) % 2**63

    def _assert_on_time(self, request: Request) -> None:
        """At its bound, not a token later, and with every query that a ring could hold."""
        bound = request.kv.protected_len + request.kv.max_tail_len
        assert request.resident_len == bound, f"{request.resident_len} slots, due at {bound}"
        wanted = min(self._state.limits.window, request.logical_len)
        num_queries = self._state.slots.num_queries(request)
        assert num_queries == wanted or not request.needs_queries, f"{num_queries} of {wanted}"

    def _num_keep(self, request: Request) -> int:
        """K, or in adaptive mode all but the last interval, but few enough to free a block."""
        kv = request.kv
        if kv.mode == "fixed":
            return kv.budget
        one_block_less = (self._num_blocks(request, request.tail_len) - 1) * self._state.block_size
        return max(
            kv.budget, min(request.tail_len - kv.interval, one_block_less - kv.protected_len)
        )

    def _num_blocks(self, request: Request, tail_len: int) -> int:
        return -(-(request.kv.protected_len + tail_len) // self._state.block_size)

    def _lacks_slot(self, request: Request) -> bool:
        return request.needs_queries and request.query_slot is None

    def _num_missing_queries(self, request: Request) -> int:
        if not request.needs_queries or self._is_strict:  # in strict mode none can be missing
            return 0
        wanted = min(self._state.limits.window, self._state.block_size)
        return max(0, wanted - self._state.slots.num_queries(request))
