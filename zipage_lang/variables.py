"""The named values of one state: known by name at once, filled when their call is done.

Knows nothing of expressions, requests or loops.
"""

import dataclasses
import threading
from concurrent.futures import Future
from typing import Any

from zipage_lang.loops import new_future


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    """One value to come. `call_index` is that of its call; -1 for a plain assignment."""

    name: str
    call_index: int = -1
    value: "Future[Any]" = dataclasses.field(default_factory=new_future)
    meta: "Future[Any]" = dataclasses.field(default_factory=new_future)

    def fill(self, value: Any, meta: Any) -> None:
        # Meta first: whoever has seen the value finds its meta.
        self.meta.set_result(meta)
        self.value.set_result(value)

    def miss(self, error: BaseException, meta: Any) -> None:
        """The call is done and told all there is to tell, but there is no value in it."""
        self.meta.set_result(meta)
        self.value.set_exception(error)

    def fail(self, error: BaseException) -> None:
        self.meta.set_exception(error)
        self.value.set_exception(error)


class Variables:
    """Name -> Variable, the last one queued under a name. Safe from any thread."""

    def __init__(self, inherited: dict[str, Variable] | None = None) -> None:
        self._lock = threading.Lock()
        self._by_name = dict(inherited or {})
        self._own_names: dict[str, None] = {}  # an ordered set
        self._awaited: dict[str, Future[Variable | None]] = {}

    def add(self, variable: Variable) -> None:
        with self._lock:
            self._by_name[variable.name] = variable
            self._own_names[variable.name] = None
            awaited = self._awaited.pop(variable.name, None)
        if awaited is not None:
            awaited.set_result(variable)

    def find(self, name: str) -> Variable | None:
        with self._lock:
            return self._by_name.get(name)

    def when_named(self, name: str) -> "Future[Variable | None]":
        """Done when something is queued under `name`, or with None by `no_more_names`."""
        with self._lock:
            future = self._awaited.setdefault(name, new_future())
            known = self._by_name.get(name)
            if known is not None:
                self._awaited.pop(name)
        if known is not None:
            future.set_result(known)
        return future

    def no_more_names(self) -> None:
        """The program's body is done: who waits for an unknown name waits in vain."""
        with self._lock:
            awaited, self._awaited = self._awaited, {}
        for future in awaited.values():
            future.set_result(None)

    @property
    def own_names(self) -> list[str]:
        """Names written since this state was forked, in order."""
        with self._lock:
            return list(self._own_names)

    def snapshot(self) -> dict[str, Variable]:
        with self._lock:
            return dict(self._by_name)
