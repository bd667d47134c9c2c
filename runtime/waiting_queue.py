"""The queue of requests that have no row, and the order they are tried in.

Between tenants by fair share, within one tenant by precedence. Knows nothing of blocks or rows.
"""

from collections.abc import Callable, Iterator

from sortedcontainers import SortedKeyList

from zipage_lang.runtime.config import Order
from zipage_lang.runtime.fair_share import Account, FairShare
from zipage_lang.runtime.request import Request

LOOKAHEAD = 64  # requests considered per step: bounds what a long queue costs


class WaitingQueue:
    """Each tenant's requests are sorted by precedence, so that a preempted one comes back to its
    old place among them."""

    def __init__(self, order: Order, max_skips: int, shares: FairShare) -> None:
        self._order = order
        self._max_skips = max_skips
        self._shares = shares
        self._num_requests = 0
        self._branches: SortedKeyList = SortedKeyList(key=lambda request: request.own_precedence)

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for account in self._shares.waiting_accounts():
            yield from account.waiting

    def add(self, request: Request) -> None:
        if not request.account.waiting:
            self._shares.line_up(request.account)
        request.account.waiting.add(request)
        self._num_requests += 1
        if request.table is not None:
            self._branches.add(request)

    def note_branch(self, request: Request) -> None:
        """One that waits has been given blocks, and they hold what they should."""
        self._branches.add(request)

    def remove(self, request: Request) -> None:
        request.account.waiting.remove(request)
        self._num_requests -= 1
        self._branches.discard(request)

    def end_turn(self, request: Request) -> None:
        """Those of its tenant that have had fewer turns take precedence from now on."""
        is_branch = request in self._branches
        request.account.waiting.remove(request)
        self._branches.discard(request)
        request.turn += 1
        request.account.waiting.add(request)
        if is_branch:
            self._branches.add(request)

    def first(self) -> Request | None:
        """Who is next among all."""
        return next(iter(self._front(1)), None)

    def first_displaced(self) -> Request | None:
        """The first whose state is in host memory."""
        return next((r for r in self._front(LOOKAHEAD) if r.swapped is not None), None)

    def take_newest_branch(self, besides: Request) -> Request | None:
        """The last in precedence that waits with blocks. It waits on, and is to give them up."""
        found = next((r for r in reversed(self._branches) if r is not besides), None)
        if found is not None:
            self._branches.remove(found)
        return found

    def in_order(self, cached_len: Callable[[Request], int]) -> list[Request]:
        """The requests to try now. `fcfs`: by precedence. `lpm`: those passed over too often first,
        then within a priority those with the longest cached prefix. Tenants by fair share."""

        def take(account: Account) -> list[Request]:
            front = list(account.waiting.islice(0, LOOKAHEAD))
            return front if len(front) < 2 else sorted(front, key=key)

        def key(request: Request) -> tuple[int, int, int, int, int]:
            if request.skips >= self._max_skips:
                return (request.priority, 0, 0, request.turn, request.arrival)
            return (request.priority, 1, -cached_len(request), request.turn, request.arrival)

        if self._order == "fcfs":
            return self._front(LOOKAHEAD)
        return self._shares.front(LOOKAHEAD, take)

    def note_admitted(self, admitted: Request) -> None:
        """Count one more skip for every earlier request of its tenant that is still waiting."""
        for request in admitted.account.waiting.islice(0, LOOKAHEAD):
            if request.own_precedence >= admitted.own_precedence:
                return
            request.skips += 1

    def _front(self, limit: int) -> list[Request]:
        """The first by precedence within each tenant."""
        return self._shares.front(limit, lambda account: list(account.waiting.islice(0, limit)))
