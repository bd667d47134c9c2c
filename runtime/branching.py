"""Branches: requests that start from another's state and share its blocks by reference.

The samples of one request branch off after its prefill; Fork branches off any state that is there.
Knows nothing of budgets or pressure.
"""

from zipage_lang.runtime.compaction_plan import CompactionPlanner
from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.request import Request, Status
from zipage_lang.runtime.scheduler_state import SchedulerState


class Branching:
    """A partly filled last block is shared too; whoever writes to it first copies it."""

    def __init__(self, state: SchedulerState, planner: CompactionPlanner) -> None:
        self._state = state
        self._planner = planner

    def branch_followers(self, leader: Request, plan: PlanBuilder) -> tuple[Request, ...]:
        """Samples that waited for the leader's prefill: those that get a row draw from its logits.

        The rest queue one token short of the prompt's end, so that they can make logits themselves.
        """
        drawing = []
        for follower in leader.followers:
            has_row = self._state.num_free_rows > 0
            if has_row and self._planner.can_resume(follower, leader.resident_len):
                self._share(leader, follower, leader.logical_len)
                self._state.start_running(follower)
                plan.set_up_row(follower)
                drawing.append(follower)
            else:
                follower.status = Status.WAITING
                self._state.waiting.add(follower)
                # Not with a free row: it might be admitted before the leader's step has run.
                if not has_row and self._planner.can_resume(follower, leader.resident_len - 1):
                    self._share(leader, follower, leader.logical_len - 1)
                    plan.branches.append((leader, follower))
        leader.followers.clear()
        return tuple(drawing)

    def start_from(self, parent: Request, child: Request) -> None:
        """Give the child what its tokens run through of the parent's state, if it may have it."""
        if parent.table is None or parent.status is Status.COMPACTING:
            return
        if parent.namespace != child.namespace:
            return
        may_share = child.signature == parent.signature and child.kv.reuse == "compacted"
        if parent.is_compacted and not may_share:
            return
        shared_len = min(self._common_len(parent, child), child.max_reusable_len)
        is_cut_inside_compacted = shared_len < parent.last_compaction_at
        resident_len = parent.resident_len - (parent.logical_len - shared_len)
        if (
            shared_len == 0
            or not self._planner.can_resume(child, resident_len)
            or is_cut_inside_compacted
            or not self._may_hold(child, parent, shared_len)
        ):
            return
        self._share(parent, child, shared_len)

    def show_in_tree(self, parent: Request) -> None:
        """A child that may not have a held state whole finds its plain blocks through the tree."""
        if parent.status is Status.HELD and parent.table is not None:
            self._state.cache.commit(parent.table, parent.token_ids, parent.logical_len)

    def _may_hold(self, child: Request, parent: Request, shared_len: int) -> bool:
        """A bounded child can't start from a plain state longer than its own bound."""
        if child.kv.mode != "fixed" or parent.is_compacted:
            return True
        room = child.kv.protected_len + child.kv.max_tail_len - self._state.limits.window
        return shared_len <= room

    def _common_len(self, parent: Request, child: Request) -> int:
        computed = parent.token_ids[: parent.logical_len]
        if child.token_ids[: len(computed)] == computed:
            return len(computed)
        pairs = zip(computed, child.token_ids, strict=False)
        return next(i for i, (ours, theirs) in enumerate([*pairs, (0, 1)]) if ours != theirs)

    def _share(self, parent: Request, child: Request, shared_len: int) -> None:
        assert parent.table is not None
        child.table = self._state.cache.fork(parent.table)
        if shared_len < parent.logical_len:
            self._state.cache.truncate(child.table, parent.logical_len - shared_len)
        child.stateful_len = parent.stateful_len
        child.last_compaction_at = parent.last_compaction_at
        child.num_cached_tokens = shared_len
        child.max_resident_len = child.resident_len
