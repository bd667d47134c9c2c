"""The queue of requests that have no row, in order of precedence, and the order they are tried in.

Knows nothing of blocks or rows.
"""

from collections.abc import Callable, Iterator

from sortedcontainers import SortedKeyList

from zipage_lang.runtime.config import Order
from zipage_lang.runtime.request import Request

LOOKAHEAD = 64  # requests considered per step: bounds what a long queue costs


class WaitingQueue:
    """Sorted by precedence, so that a preempted request comes back to its old place."""

    def __init__(self, order: Order, max_skips: int) -> None:
        self._order = order
        self._max_skips = max_skips
        self._requests: SortedKeyList = SortedKeyList(key=lambda request: request.precedence)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        yield from self._requests

    def add(self, request: Request) -> None:
        self._requests.add(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def first_displaced(self) -> Request | None:
        """The first in precedence whose state is in host memory."""
        front = self._requests.islice(0, LOOKAHEAD)
        return next((request for request in front if request.swapped is not None), None)

    def newest_first(self) -> Iterator[Request]:
        yield from reversed(self._requests)

    def in_order(self, cached_len: Callable[[Request], int]) -> list[Request]:
        """The requests to try now. `fcfs`: by precedence. `lpm`: those passed over too often first,
        then within a priority those with the longest cached prefix."""
        front = list(self._requests.islice(0, LOOKAHEAD))
        if self._order == "fcfs" or len(front) < 2:
            return front

        def key(request: Request) -> tuple[int, int, int, int, int]:
            if request.skips >= self._max_skips:
                return (request.priority, 0, 0, request.turn, request.arrival)
            return (request.priority, 1, -cached_len(request), request.turn, request.arrival)

        return sorted(front, key=key)

    def note_admitted(self, admitted: Request) -> None:
        """Count one more skip for every earlier request that is still waiting."""
        for request in self._requests.islice(0, LOOKAHEAD):
            if request.precedence >= admitted.precedence:
                return
            request.skips += 1
