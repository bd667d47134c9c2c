"""The common case of a step, planned cheaply: a decode that leaves nothing to decide.

Every row of a large batch comes by here at every step, so this is most of the host's time. What it
takes on, it plans exactly as the scheduler's general path would; the rest it leaves to that path.
Knows nothing of budgets, pressure or compaction.
"""

from zipage_lang.radix_cache.block_table import BlockTable
from zipage_lang.runtime.plan_builder import PlanBuilder
from zipage_lang.runtime.request import Request
from zipage_lang.runtime.scheduler_state import SchedulerState
from zipage_lang.runtime.step_plan import Chunk


class SteadyDecodes:
    """Decodes that need no block and are far from every bound."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def plan(self, request: Request, plan: PlanBuilder) -> bool:
        """Put one token of a running request into the step. False where more may be in question;
        then nothing has changed, but that the request has a query slot if one was free."""
        table, row = request.table, request.row
        if table is None or row is None or not _is_steady(request, table):
            return False
        position, resident_start = table.logical_len, table.resident_len
        if request.query_slot is None:
            self._state.slots.provide_free(request)
        if not self._state.cache.append_in_place(table):
            return False
        slot = request.query_slot
        chunk = Chunk(row, 1, None, position, resident_start, (row,), slot, None)
        if resident_start >= request.max_resident_len:
            request.max_resident_len = resident_start + 1
        request.is_stalled = False
        request.num_pending += 1
        plan.add_decode(request, chunk)
        return True


def _is_steady(request: Request, table: BlockTable) -> bool:
    """A drawn token waits to be computed, nobody follows it, and neither the end by count nor a
    compaction nor the line where it takes a query slot is near."""
    num_tokens = len(request.token_ids) + request.num_pending
    return (
        num_tokens - table.logical_len == 1
        and request.num_prompt_tokens < num_tokens < request.end_len
        and (table.resident_len < request.query_line or request.kv.mode != "fixed")
        and not request.followers
    )
