"""Query slots: rings that keep a request's last queries for scoring; fewer than requests may be.

Hybrid scheduling (arXiv 2603.08743, section on query slots): a request gets a slot before its tail
comes within `window` tokens of being due; without one it waits at that line.
Knows nothing of blocks or tensors.
"""

from collections.abc import Iterable

from zipage_lang.runtime.request import Request, Status


class QuerySlots:
    """Hands out slots: at once while some are free, else by taking one that is not needed yet."""

    def __init__(self, num_slots: int, window: int) -> None:
        self._window = window
        self._free = list(range(num_slots - 1, -1, -1))
        self._holders: dict[int, Request] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_queries(self, request: Request) -> int:
        """How many of the request's last tokens have their query in its ring."""
        if request.query_slot is None:
            return 0
        return min(self._window, request.logical_len - request.query_slot_since)

    def provide(self, requests: Iterable[Request]) -> None:
        """As `provide_free`, or at their line take one that is not needed yet.

        Only before any chunk of the step is planned: a ring has one writer per step.
        """
        for request in requests:
            if request.query_slot is None and request.needs_queries:
                if self._free:
                    self._give(request, self._free.pop())
                elif request.kv.mode == "fixed" and request.resident_len >= request.query_line:
                    self._borrow(request)

    def provide_free(self, request: Request) -> None:
        """Give the request a slot if it can use one and one is free."""
        if request.query_slot is None and request.needs_queries and self._free:
            self._give(request, self._free.pop())

    def release(self, request: Request) -> None:
        """Take the slot back, if there is one."""
        if request.query_slot is None:
            return
        del self._holders[request.query_slot]
        self._free.append(request.query_slot)
        request.query_slot = None

    def check_invariants(self) -> None:
        """Every slot is free or held by exactly the request that says so."""
        for slot, holder in self._holders.items():
            assert holder.query_slot == slot, f"slot {slot} is not its holder's {holder.query_slot}"
            assert holder.row is not None, (
                f"slot {slot} is held by {holder.request_id}, not running"
            )
            assert slot not in self._free, f"slot {slot} is free and held"

    def _give(self, request: Request, slot: int) -> None:
        self._holders[slot] = request
        request.query_slot = slot
        request.query_slot_since = request.logical_len

    def _borrow(self, request: Request) -> None:
        lender = self._pick_lender(request)
        if lender is not None:
            slot = lender.query_slot
            assert slot is not None
            lender.query_slot = None
            self._give(request, slot)

    def _pick_lender(self, request: Request) -> Request | None:
        """The holder farthest from needing its slot; past its line one keeps it to the end."""
        idle = [holder for holder in self._holders.values() if self._can_lend(holder, request)]
        return max(idle, key=self._distance, default=None)

    def _can_lend(self, holder: Request, request: Request) -> bool:
        if holder.status is not Status.RUNNING:
            return False
        if holder.kv.mode == "adaptive":  # may need it at any time, so lends to its betters only
            return holder.precedence > request.precedence
        return self._distance(holder) >= 0

    def _distance(self, holder: Request) -> int:
        return holder.query_line - holder.resident_len
