"""The state `s` of a program: what the body appends to, which never waits.

Knows nothing of how values are waited for, how expressions run, or of decorators.
"""

import contextlib
from collections.abc import Generator
from typing import Any, Self

from zipage_lang.budgets import Account, Budget
from zipage_lang.ir import Role, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, checked_name
from zipage_lang.state_core import StateCore
from zipage_lang.variables import Variable


class StateHandle:
    """What blocking and async programs have in common: appending never waits."""

    def __init__(self, core: StateCore) -> None:
        self.core = core

    def __iadd__(self, value: Any) -> Self:
        """Append a string or expression. Raises ValueError at once for what can't be appended."""
        self.core.append(value)
        return self

    def append(self, value: Any) -> Self:
        """`s += value` as a method, for lambdas; returns the state."""
        self.core.append(value)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        """Store a plain value; readers find it at once."""
        self.core.assign(name, value)

    def __contains__(self, name: str) -> bool:
        """Whether something was queued or stored under `name`, finished or not."""
        return self.core.variables.find(name) is not None

    def system(self) -> contextlib.AbstractContextManager[None]:
        """`with s.system():` what is appended inside is the system message."""
        return self._role("system")

    def user(self) -> contextlib.AbstractContextManager[None]:
        """As `system`, for a user message."""
        return self._role("user")

    def assistant(self) -> contextlib.AbstractContextManager[None]:
        """As `system`, for an assistant message."""
        return self._role("assistant")

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Generator[None]:
        """`with s.var_scope("x"):` all text appended inside becomes the value of "x"."""
        self.core.append(ScopeBegin(checked_name(name)))
        yield
        self.core.append(ScopeEnd(name))

    def cancel(self, reason: str | None = None) -> None:
        """Give this state up, and all its branches: running requests are aborted at once.

        What is not there yet raises RunCancelledError, which tells the reason; values stay.
        """
        self.core.cancel(reason)

    @property
    def index(self) -> int:
        """Which branch of its fork this is, from 0; 0 for what was never forked."""
        return self.core.place

    @property
    def stop_reason(self) -> str | None:
        """Which limit of a budget last stopped a call of this state ("tokens", "calls", "seconds",
        "kv_tokens"), or kept one from beginning; None while none did. Does not wait.
        """
        return self.core.door.stop_reason

    @contextlib.contextmanager
    def budget(self, budget: Budget | None = None, **limits: Any) -> "Generator[Account]":
        """`with s.budget(tokens=500):` what is appended or forked inside spends from this budget.

        Takes a `Budget` or its fields, and spends from all budgets around it too. Gives its
        account: `reason`, `num_tokens`, `num_calls` so far. Raises ValueError for a bad limit.
        """
        account = self.core.enter(Budget(**limits) if budget is None else budget)
        try:
            yield account
        finally:
            self.core.leave(account)

    @property
    def root_seed(self) -> int:
        """Give it to `run(seed=...)` to draw the same samples again."""
        return self.core.session.settings.root_seed

    @contextlib.contextmanager
    def _role(self, role: Role) -> Generator[None]:
        self.core.append(RoleBegin(role))
        yield
        self.core.append(RoleEnd(role))

    def _spell(self, token_id: int) -> str:
        backend = self.core.session.settings.backend
        return backend.decode([token_id], skip_special_tokens=False)

    def _known(self, name: str) -> Variable:
        variable = self.core.variables.find(name)
        if variable is None:
            raise KeyError(name)
        return variable
