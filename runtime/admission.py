"""Who of the waiting gets a row this step, and with which blocks: cache hits, branches, swap-ins.

Knows nothing of running requests' chunks or of the step budget.
"""

from zipage_lang.radix_cache.prefix_cache import Match
from zipage_lang.runtime.compaction_plan import CompactionPlanner
from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.request import Request
from zipage_lang.runtime.scheduler_state import SchedulerState


class Admission:
    """Tries the waiting in order; stops at the first that memory or rows have no place for."""

    def __init__(self, state: SchedulerState, planner: CompactionPlanner) -> None:
        self._state = state
        self._planner = planner

    def candidates(self) -> list[Request]:
        return self._state.waiting.in_order(self._cached_len)

    def should_wait_for_sibling(self, request: Request) -> bool:
        """Whether a running prefill computes a prefix that this request may share next step."""
        if request.table is not None or request.swapped is not None:
            return False
        cache, block_size = self._state.cache, self._state.block_size
        if not cache.enabled:
            return False
        prefilling = [other for other in self._state.running if self._is_prefilling(other, request)]
        if not prefilling:
            return False
        shared = self._cached_len(request) // block_size * block_size + block_size
        most_plain = self._max_plain_len(request)
        if shared > request.max_reusable_len or (most_plain is not None and shared > most_plain):
            return False
        wanted = request.token_ids[:shared]
        return any(other.token_ids[:shared] == wanted for other in prefilling)

    def admit(self, request: Request, plan: PlanBuilder, is_alone: bool) -> bool:
        """Give the request a row and its first blocks, or leave everything as it was.

        Its remaining prompt must fit in what is free or evictable (as far as it will grow before
        it compacts), and some blocks stay in reserve for those who run; alone it needs no reserve.
        """
        if request.swapped is not None:
            return self._swap_in(request, plan, is_alone)
        match = self._open(request) if request.table is None else None
        assert request.table is not None
        growth = min(request.num_uncomputed, max(1, self._planner.room(request)))
        needed = self._state.cache.num_new_blocks(request.table, growth)
        if not is_alone and needed + self._reserve() > self._state.cache.num_available:
            if match is not None:
                self._state.cache.undo_open(request.table, match)
                request.table = None
            return False
        self._start(request, plan)
        if match is not None:
            self._count_hit(request)
        return True

    def _is_prefilling(self, other: Request, request: Request) -> bool:
        return (
            other.namespace == request.namespace
            and not other.is_compacted
            and not other.is_prefilled
        )

    def _open(self, request: Request) -> Match:
        match = self._match(request)
        request.table = self._state.cache.open(match)
        request.is_prefilled = False
        request.stateful_len = match.stateful_len
        request.last_compaction_at = match.num_tokens if match.is_compacted else 0
        return match

    def _cached_len(self, request: Request) -> int:
        if request.table is not None:
            return request.logical_len
        if request.swapped is not None:
            return request.swapped.table.logical_len
        return self._match(request).num_tokens

    def _match(self, request: Request) -> Match:
        signature = request.signature if request.kv.reuse == "compacted" else None
        match = self._match_with(request, signature)
        if self._planner.can_resume(request, match.resident_len):
            return match
        return self._match_with(request, None)

    def _match_with(self, request: Request, signature: str | None) -> Match:
        return self._state.cache.match(
            request.token_ids[: request.max_reusable_len + 1],
            namespace=request.namespace,
            signature=signature,
            max_plain_len=self._max_plain_len(request),
        )

    def _max_plain_len(self, request: Request) -> int | None:
        """A bounded request takes no more of a plain prefix than it could hold itself, less the
        tokens whose queries it needs before its first compaction."""
        if request.kv.mode == "off":
            return None
        if request.kv.mode == "adaptive":
            return self._planner.longest_start(request) - 1
        bound = request.kv.protected_len + request.kv.max_tail_len
        if request.needs_queries:
            bound -= self._state.limits.window
        return max(0, bound)

    def _start(self, request: Request, plan: PlanBuilder) -> None:
        self._state.waiting.remove(request)
        self._state.start_running(request)
        self._state.waiting.note_admitted(request)
        plan.set_up_row(request)

    def _count_hit(self, request: Request) -> None:
        """Prompt tokens found in the tree count as cached, unless this request computed them."""
        if request.max_computed_len == 0:
            request.num_cached_tokens = request.logical_len
        num_again = max(0, request.max_computed_len - request.logical_len)
        request.num_recomputed += num_again
        self._state.counts.num_recomputed_tokens += num_again

    def _swap_in(self, request: Request, plan: PlanBuilder, is_alone: bool) -> bool:
        swapped = request.swapped
        assert swapped is not None
        cache = self._state.cache
        reserve = len(self._state.running)  # a block each, so that it does not go back at once
        if not is_alone and len(swapped.host_ids) + reserve > cache.num_available:
            return False
        table = cache.swap_in(swapped.table, request.token_ids)
        if table is None:
            return False
        request.table, request.swapped = table, None
        num_found = table.num_prefix_blocks
        self._state.host.free(swapped.host_ids[:num_found])
        plan.swap_in(table.block_ids[num_found:], swapped.host_ids[num_found:])
        self._state.counts.num_swap_ins += 1
        self._start(request, plan)
        return True

    def _reserve(self) -> int:
        """Blocks that the running will soon grow into, so that no admission is undone at once."""
        horizon = self._state.config.growth_reserve
        growth = sum(
            min(horizon, max(0, self._planner.growth_left(request)))
            for request in self._state.running
        )
        return min(growth // self._state.block_size, self._state.cache.num_blocks // 10)
