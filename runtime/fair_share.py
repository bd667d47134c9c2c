"""Shares the engine among tenants by tokens: of those that wait, who was given least goes next.

One counter of served tokens per tenant, after the virtual token counter of "Fairness in Serving
Large Language Models" (arXiv 2401.00588, algorithm 2): a tenant that begins to wait starts no lower
than the lowest of those that wait, so being idle saves nothing up, and what it was given before is
not forgotten while others still wait. Between two tenants that wait all the time the counters never
differ by more than one prompt and what the running requests of one of them may still draw.
Knows nothing of blocks, rows or steps.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedKeyList

MAX_DEBTORS = 10_000  # tenants without requests whose counter is remembered


class Queued(Protocol):
    """What is asked of a request that waits."""

    @property
    def own_precedence(self) -> tuple[int, int, int]: ...  # among its tenant's

    @property
    def num_uncharged(self) -> int: ...  # tokens that its tenant is charged with when it is let in


QueuedT = TypeVar("QueuedT", bound=Queued)


def _own_precedence(request: Queued) -> tuple[int, int, int]:
    return request.own_precedence


@dataclasses.dataclass(slots=True, eq=False)
class Account:
    """One tenant's: what it was given, and its requests that wait, in their own order."""

    tenant: str = ""
    number: int = 0  # no two have the same
    served: int = 0  # tokens: prompts that were computed for it, and what its requests drew
    last_admission: int = 0  # of equals, who was let in longest ago goes first
    round: int = 0  # whole shares of `served`, as of the last step: orders who must give way
    num_live: int = 0  # requests that have not ended
    num_running: int = 0  # of these, with a row
    waiting: SortedKeyList = dataclasses.field(
        default_factory=lambda: SortedKeyList(key=_own_precedence)
    )
    is_lined_up: bool = False  # stands in the line of tenants
    is_debtor: bool = False  # stands among those whose counter is remembered

    @property
    def num_queued(self) -> int:
        """Requests that have no row, samples that follow a leader included."""
        return self.num_live - self.num_running


class FairShare:
    """Accounts of tenants that have requests, and the line of those that wait.

    Heap entries may be out of date: counters only grow, so an entry that comes to the top is set
    right there, and nothing has to be moved when tokens are counted.
    """

    def __init__(self, round_len: int) -> None:
        """round_len: tokens that a tenant is given before those given less may take its places."""
        self.num_live = 0
        self._round_len = round_len
        self._accounts: dict[str, Account] = {}
        self._line: list[tuple[int, int, int, Account]] = []
        self._debtors: list[tuple[int, int, Account]] = []
        self._num_accounts = 0
        self._num_admissions = 0
        self._last_admitted: Account | None = None

    @property
    def num_tenants(self) -> int:
        """Tenants that have requests or are remembered."""
        return len(self._accounts)

    def round_of(self, account: Account) -> int:
        """Its round as of now."""
        return account.served // self._round_len

    def join(self, tenant: str, num_requests: int) -> Account:
        """The account of a tenant that has so many requests more."""
        self._forgive()
        account = self._accounts.get(tenant)
        if account is None:
            self._num_accounts += 1
            account = self._accounts[tenant] = Account(tenant, self._num_accounts)
        account.num_live += num_requests
        self.num_live += num_requests
        return account

    def leave(self, account: Account) -> None:
        """One of its requests has ended."""
        account.num_live -= 1
        self.num_live -= 1
        assert account.num_live >= 0, f"tenant {account.tenant!r} has {account.num_live} requests"
        if self.num_live == 0:
            self._forget_all()
        elif account.num_live == 0:
            self._note_debt(account)

    def line_up(self, account: Account) -> None:
        """Its first waiting request is about to come: it starts level with those that wait."""
        account.served = max(account.served, self._floor())
        if not account.is_lined_up:
            account.is_lined_up = True
            self._push(account)

    def note_admitted(self, account: Account, num_tokens: int) -> None:
        """One of its requests got a row, and so many tokens will be computed for it first."""
        self._num_admissions += 1
        account.last_admission = self._num_admissions
        account.served += num_tokens
        self._last_admitted = account

    def num_queued_of(self, tenant: str) -> int:
        """Requests of the tenant that have no row."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_queued

    def waiting_accounts(self) -> Iterator[Account]:
        """Those that wait, in no order."""
        return (account for _, _, _, account in self._line if account.waiting)

    def front(self, limit: int, take: Callable[[Account], Sequence[QueuedT]]) -> list[QueuedT]:
        """The next requests, at most `limit`, in the order they come to if each is let in at once.

        Args:
            take: a tenant's requests that may be next, in the order it wants.
        """
        first = self._first()
        if first is None:
            return []
        if len(self._line) == 1:
            return list(take(first)[:limit])
        merge: _Merge[QueuedT] = _Merge(take)
        while len(merge.picked) < limit:
            while (first := self._first()) is not None and merge.is_behind(first):
                heapq.heappop(self._line)
                merge.add(first)
            if not merge.pick(self._num_admissions):
                break
        for account in merge.accounts:
            self._push(account)
        return merge.picked

    def _first(self) -> Account | None:
        """The account at the head of the line, which is set right on the way."""
        while self._line:
            account = self._line[0][3]
            if account.waiting and self._line[0][:2] == _standing(account):
                return account
            heapq.heappop(self._line)
            account.is_lined_up = bool(account.waiting)
            if account.is_lined_up:
                self._push(account)
        return None

    def _push(self, account: Account) -> None:
        heapq.heappush(self._line, (*_standing(account), account.number, account))

    def _floor(self) -> int:
        """Where a tenant starts: level with the lowest of those that wait, else with the last who
        stopped waiting."""
        account = self._first() or self._last_admitted
        return 0 if account is None else account.served

    def _note_debt(self, account: Account) -> None:
        if not account.is_debtor:
            account.is_debtor = True
            heapq.heappush(self._debtors, (account.served, account.number, account))

    def _forgive(self) -> None:
        """Forget the accounts of those who have no requests and would start higher by now."""
        floor = self._floor()
        while self._debtors and (self._debtors[0][0] <= floor or len(self._debtors) > MAX_DEBTORS):
            _, _, account = heapq.heappop(self._debtors)
            account.is_debtor = False
            if account.num_live:
                continue
            if account.served > floor and len(self._debtors) < MAX_DEBTORS:
                self._note_debt(account)
            else:
                del self._accounts[account.tenant]

    def _forget_all(self) -> None:
        self._accounts.clear()
        self._line.clear()
        self._debtors.clear()
        self._last_admitted = None


class _Merge(Generic[QueuedT]):
    """The requests of several tenants, whoever would have been given least first."""

    def __init__(self, take: Callable[[Account], Sequence[QueuedT]]) -> None:
        self.picked: list[QueuedT] = []
        self.accounts: list[Account] = []
        self._take = take
        self._heads: list[tuple[int, int, int, QueuedT, Iterator[QueuedT]]] = []

    def is_behind(self, account: Account) -> bool:
        """Whether the account goes before all that were added."""
        return not self._heads or _standing(account) < self._heads[0][:2]

    def add(self, account: Account) -> None:
        self.accounts.append(account)
        self._push(*_standing(account), account.number, iter(self._take(account)))

    def pick(self, num_admissions: int) -> bool:
        """Take the first. False when none is left."""
        if not self._heads:
            return False
        served, _, number, request, others = heapq.heappop(self._heads)
        self.picked.append(request)
        served += request.num_uncharged
        self._push(served, num_admissions + len(self.picked), number, others)
        return True

    def _push(
        self, served: int, last_admission: int, number: int, requests: Iterator[QueuedT]
    ) -> None:
        """`number` is the tenant's own, so that requests are never compared."""
        request = next(requests, None)
        if request is not None:
            heapq.heappush(self._heads, (served, last_admission, number, request, requests))


def _standing(account: Account) -> tuple[int, int]:
    return (account.served, account.last_admission)
