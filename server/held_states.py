"""Held states are let go when nobody has used them for long: their owner may be gone.

Knows nothing of what they hold. A state that is let go too early costs its owner time, no more:
what it held is found in the tree, or computed again.
"""

import asyncio
from collections.abc import Callable, Iterable

LEASE_S = 600.0


class HeldStates:
    """Calls `release(request_ids)` for each state not renewed for `lease_s` seconds.

    `lease_s`: None is LEASE_S.
    """

    def __init__(
        self, release: Callable[[list[str]], None], *, lease_s: float | None = None
    ) -> None:
        self._release = release
        self._lease_s = LEASE_S if lease_s is None else lease_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._expected: set[str] = set()  # of requests that have not ended

    def __len__(self) -> int:
        return len(self._timers) + len(self._expected)

    def expect(self, request_ids: Iterable[str]) -> list[str]:
        """These run, and will hold their states when they end. Tells those that nothing is known
        of: another one's state, held or still to come, must not be let go by this call's end."""
        known = self._expected | self._timers.keys()
        new = [request_id for request_id in request_ids if request_id not in known]
        self._expected.update(new)
        return new

    def begin(self, request_ids: Iterable[str]) -> None:
        """They have ended: begin the leases, or begin them again. Whose owner was quicker to
        release is let go again: the engine may have heard it before there was anything to let go.
        """
        for request_id in request_ids:
            if request_id in self._expected or request_id in self._timers:
                self._expected.discard(request_id)
                self.add(request_id)
            else:
                self._release([request_id])

    def add(self, request_id: str) -> None:
        """Begin a lease, or begin it again."""
        self.forget([request_id])
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_later(self._lease_s, self._expire, request_id)

    def renew(self, request_id: str) -> None:
        """Begin the lease again of a state that has one."""
        if request_id in self._timers:
            self.add(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Their owner released them, perhaps before their end was noticed here."""
        for request_id in request_ids:
            self._expected.discard(request_id)
            timer = self._timers.pop(request_id, None)
            if timer is not None:
                timer.cancel()

    def _expire(self, request_id: str) -> None:
        del self._timers[request_id]
        self._release([request_id])
