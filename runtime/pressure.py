"""What gives way when blocks are short, in the design's order.

The tree's unlocked leaves have already been evicted when this is asked. Then: states held for a
later fork, early compactions, branches that wait with blocks, the running request that is last in
precedence and fits in host memory (swapped), else the last that is not compacted (preempted: its
blocks stay in the tree, evictable). Only requests of lower precedence give way to a running one, so
the first can always go on.
Knows nothing of step budgets.
"""

import enum
from collections.abc import Callable, Iterator
from typing import TypeVar

from zipage_lang.runtime.compaction_plan import CompactionPlanner
from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.request import Request, Status, SwappedState
from zipage_lang.runtime.scheduler_state import SchedulerState

T = TypeVar("T")


class Relief(enum.Enum):
    NOW = "now"  # blocks were given up: try again
    NEXT_STEP = "next step"  # a compaction in this step frees blocks
    NONE = "none"  # nothing can give way


class Pressure:
    """Finds blocks for those who need them."""

    def __init__(self, state: SchedulerState, planner: CompactionPlanner) -> None:
        self._state = state
        self._planner = planner

    def with_room(
        self, request: Request, plan: PlanBuilder, attempt: Callable[[], T | None]
    ) -> T | None:
        """The attempt's result, making room until it succeeds; None: the request must sit out."""
        while (result := attempt()) is None:
            if self._relieve(request, plan) is not Relief.NOW:
                return None
        return result

    def release_held(self) -> bool:
        """Let the tree have the oldest held state. False when there is none."""
        for request_id, request in self._state.held.items():
            self._state.keep_in_tree(request)
            request.status = Status.ENDED
            del self._state.held[request_id]
            return True
        return False

    def release_waiting_branch(self, besides: Request) -> bool:
        """The newest branch that waits with its parent's blocks gives them to the tree."""
        request = self._state.waiting.take_newest_branch(besides)
        if request is None:
            return False
        self._state.keep_in_tree(request)
        return True

    def compact_adaptive(self, plan: PlanBuilder) -> bool:
        """Someone waits for memory: whoever runs in adaptive mode and can drop most, does."""
        return self._compact_first(
            [r for r in self._state.running if r.kv.mode == "adaptive"], plan
        )

    def _compact_first(self, requests: list[Request], plan: PlanBuilder) -> bool:
        """Plan the early compaction that drops most. False when nobody can."""
        candidates = [
            request
            for request in requests
            if not plan.is_planned(request) and self._planner.can_compact_early(request)
        ]
        candidates.sort(key=lambda request: request.kv.budget - request.tail_len)
        for request in candidates:
            if self._planner.plan_in_place(request, plan):
                self._state.counts.num_early_compactions += 1
                return True
        return False

    def preempt(self, request: Request, plan: PlanBuilder) -> None:
        """Back to its place in the queue; what is computed stays in the tree if there is room."""
        assert request.table is not None, f"{request.request_id} runs without blocks"
        assert not plan.is_coming_back(request), f"{request.request_id} is not all there yet"
        self._state.stop_running(request)
        self._state.keep_in_tree(request)
        request.status = Status.WAITING
        self._state.waiting.add(request)
        self._state.counts.num_preemptions += 1

    def _relieve(self, request: Request, plan: PlanBuilder) -> Relief:
        if self.release_held():
            return Relief.NOW
        is_coming = self._state.num_blocks_coming > plan.blocks_promised
        if is_coming or self._compact_first(list(self._state.running), plan):
            plan.blocks_promised += 1
            return Relief.NEXT_STEP
        if self.release_waiting_branch(besides=request):
            return Relief.NOW
        victim = self._pick_victim(request, plan)
        if victim is None:
            return Relief.NONE
        plan.has_displaced = True
        self.displace(victim, plan)
        return Relief.NOW

    def displace(self, victim: Request, plan: PlanBuilder) -> None:
        """Take the victim's place away: to host memory if it fits there, else preempted."""
        if self.can_swap_out(victim):
            self._swap_out(victim, plan)
        else:
            self.preempt(victim, plan)

    def can_swap_out(self, victim: Request) -> bool:
        """Whether the victim's state fits in host memory and may go on from there."""
        table = victim.table
        if table is None or not victim.is_prefilled:
            return False
        fits = len(table.block_ids) <= self._state.host.num_free
        return fits and self._planner.can_resume(victim, victim.resident_len)

    def _pick_victim(self, request: Request, plan: PlanBuilder) -> Request | None:
        """The last in precedence that host memory takes, else the last that is not compacted (it
        can be computed again as it was), else the last."""
        victims = list(self._victims(request, plan))
        swappable = (victim for victim in victims if self.can_swap_out(victim))
        plain = (victim for victim in victims if not victim.is_compacted)
        return next(swappable, None) or next(plain, victims[0] if victims else None)

    def _victims(self, request: Request, plan: PlanBuilder) -> Iterator[Request]:
        """Nobody who came in this step: swap-ins follow swap-outs, so it would take with it what
        has not come yet."""
        for victim in reversed(self._state.running):
            if victim.precedence <= request.precedence:
                return
            is_idle = victim.status is Status.RUNNING and not plan.is_planned(victim)
            if is_idle and not plan.is_set_up(victim):
                yield victim

    def _swap_out(self, victim: Request, plan: PlanBuilder) -> None:
        table = victim.table
        assert table is not None
        host_ids = self._state.host.allocate(len(table.block_ids))
        assert host_ids is not None, f"no {len(table.block_ids)} host blocks, yet asked for"
        plan.swap_out(list(table.block_ids), host_ids)
        self._state.stop_running(victim)
        victim.swapped = SwappedState(host_ids, self._state.take_to_host(victim))
        victim.status = Status.WAITING
        self._state.waiting.add(victim)
        self._state.counts.num_swap_outs += 1
