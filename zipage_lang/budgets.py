"""What a part of a program may spend: tokens, calls, seconds, KV tokens; and what is left of it.

Knows nothing of requests, states or backends.
"""

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

StopReason = Literal["tokens", "calls", "seconds", "kv_tokens"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What calls may spend together: `run(budget=)`, `with s.budget(...)`, `s.fork(n, budget=)`.

    When it runs out, the calls that are running stop with what they have, later calls return at
    once with nothing, and the program goes on: `s.stop_reason` and `s.meta(name).stop_reason` say
    why. Budgets nest: what is spent in an inner one is spent from all that are around it.

    Parameters:
        tokens: generated tokens, of all samples. Counted as they stream in, never reserved: a call
            gets what is left as its max_tokens, and of calls side by side the last tokens go to
            whoever draws them first. The sum over all results is never more than this.
        calls: gens and selects; one that is resumed or retried by the engine counts once.
        seconds: wall time from the first call on (for `run`: from its start).
        kv_tokens: KV slots that the calls running at one time may hold together; each counts its
            whole context, shared or not. A call that would need more does not begin, or ends; the
            others go on, and what comes when they have ended may run again.

    Errors: ValueError for no limit at all, or one that is not above zero.

    >>> program = zipage.function(lambda s: s.append(zipage.gen("x")))
    >>> backend = zipage.testing.ScriptedBackend("abcdefgh")
    >>> program.run(backend=backend, budget=zipage.Budget(tokens=3))["x"]
    'abc'
    """

    tokens: int | None = None
    calls: int | None = None
    seconds: float | None = None
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        limits = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            raise ValueError(f"a budget needs a limit; give one of {', '.join(limits)}")
        for name, limit in given.items():
            _check_limit(name, limit)


def _check_limit(name: str, limit: Any) -> None:
    kinds = (int, float) if name == "seconds" else (int,)
    if isinstance(limit, bool) or not isinstance(limit, kinds) or not 0 < limit < math.inf:
        what = "seconds" if name == "seconds" else "a whole number"
        raise ValueError(f"budget {name}={limit!r} must be {what} above zero")


class Account:
    """What is left of one budget and of all around it. Changed on the event loop only."""

    def __init__(self, budget: Budget, outer: "Account | None" = None) -> None:
        self.budget = budget
        self.num_tokens = 0  # spent so far
        self.num_calls = 0
        self.kv_tokens = 0  # held at the moment
        self.outer = outer
        self._reason: StopReason | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def reason(self) -> StopReason | None:
        """Which limit ran out, of this budget or one around it; None while none has."""
        return next((a._reason for a in self._chain() if a._reason is not None), None)

    @property
    def tokens_left(self) -> int | None:
        """Tokens that may still be drawn; None where no budget limits them."""
        limits = [
            account.budget.tokens - account.num_tokens
            for account in self._chain()
            if account.budget.tokens is not None
        ]
        return min(limits, default=None)

    def start_clock(self) -> None:
        """The first call is here: seconds count from now on."""
        for account in self._chain():
            if account.budget.seconds is not None and account._timer is None:
                loop = asyncio.get_running_loop()
                account._timer = loop.call_later(
                    account.budget.seconds, account._run_out, "seconds"
                )

    @property
    def must_stop(self) -> bool:
        """Whether running calls have to end; more calls than allowed only keep new ones out."""
        return any(a._reason not in (None, "calls") for a in self._chain())

    def take_call(self) -> bool:
        """Count one call. False where it may not begin; then nothing is counted."""
        self.start_clock()
        for account in self._chain():
            if account.budget.calls is not None and account.num_calls >= account.budget.calls:
                account._reason = account._reason or "calls"
        if self.reason is not None:
            return False
        for account in self._chain():
            account.num_calls += 1
        return True

    def take_tokens(self, num_tokens: int) -> int:
        """Spend up to `num_tokens`; returns how many there were. None are spent once it ran out."""
        if self.must_stop:
            return 0
        left = self.tokens_left
        taken = num_tokens if left is None else min(num_tokens, left)
        for account in self._chain():
            account.num_tokens += taken
        for account in self._chain():
            if account.budget.tokens is not None and account.num_tokens >= account.budget.tokens:
                account._run_out("tokens")
        return taken

    def hold_kv(self, num_more: int) -> bool:
        """A call holds `num_more` more KV tokens (or fewer). False, and no change, for too many."""
        for account in self._chain():
            limit = account.budget.kv_tokens
            if limit is not None and num_more > 0 and account.kv_tokens + num_more > limit:
                return False
        for account in self._chain():
            account.kv_tokens += num_more
        return True

    def watch(self, task: "asyncio.Task[Any]") -> None:
        """`task` runs a call: it is cancelled when a limit runs out."""
        for account in self._chain():
            account._running.add(task)

    def unwatch(self, task: "asyncio.Task[Any]") -> None:
        for account in self._chain():
            account._running.discard(task)

    def _chain(self) -> "Iterator[Account]":
        account: Account | None = self
        while account is not None:
            yield account
            account = account.outer

    def _run_out(self, reason: StopReason) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        current = _current_task()
        for task in list(self._running):
            if task is not current:
                task.cancel()


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
