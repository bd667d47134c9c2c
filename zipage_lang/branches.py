"""The branches of one fork: append to all of them, read them, join them.

`as_completed` gives them as they end; `cancel` gives up those that are not needed any more.
Joining puts each name that the branches wrote since their fork into the parent, as one list in
branch order. A parent's name holds the list of the last join that wrote it; the lists of earlier
forks stay where they are, in their own groups: `group["name"]`.
Knows nothing of how branches run.
"""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, cast

from zipage_lang.state_core import StateCore
from zipage_lang.stream import BranchDelta, read_logs
from zipage_lang.variables import Variable

JoinMode = Literal["gather", "concat", "gather_variable", "concate_and_append"]
SGLANG_MODES = {"gather_variable": "gather", "concate_and_append": "concat"}
OnError = Literal["raise", "keep", "drop"]


class Branch(Protocol):
    """What the group needs of a branch's handle."""

    @property
    def core(self) -> StateCore: ...


S = TypeVar("S", bound=Branch)


class BranchGroup(Generic[S]):
    """What blocking and async programs have in common."""

    def __init__(self, parent: StateCore, states: Sequence[S]) -> None:
        self._parent = parent
        self.states = list(states)

    def __iadd__(self, value: Any) -> Self:
        """Append to every branch: one expression, a list with one for each, or a function of the
        index.
        """
        for core, part in zip(self._cores, self._parts(value), strict=True):
            core.append(part)
        return self

    def __setitem__(self, index: int, state: S) -> None:
        """Only what `group[i] += expr` puts back: the branch itself. Raises TypeError otherwise."""
        if state is not self.states[index]:
            raise TypeError(f"branch {index} can't be replaced; append to it with +=")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def _parts(self, value: Any) -> list[Any]:
        if callable(value):
            return [value(index) for index in range(len(self))]
        if not isinstance(value, list | tuple):
            return [value] * len(self)
        if len(value) != len(self):
            raise ValueError(
                f"{len(value)} expressions for {len(self)} branches; give one for each"
            )
        return list(value)

    def cancel(self, rest: Iterable[S] | None = None, *, reason: str | None = None) -> None:
        """Give branches up: their requests are aborted, their memory is free at the next step.

        Parameters:
            rest: which ones; None: all that have not ended.
            reason: told by the RunCancelledError that their unfinished values raise.

        Values that are there stay. `join(on_error="drop")` leaves cancelled branches out.

        >>> def program(s):
        ...     branches = s.fork(2)
        ...     branches += zipage.gen("x")
        ...     branches.cancel(branches.states[1:], reason="one is enough")
        ...     branches.join(on_error="drop")
        >>> zipage.function(program).run(backend=zipage.testing.ScriptedBackend("yes"))["x"]
        ['yes']
        """
        chosen = None if rest is None else [state.core for state in rest]
        self._parent.session.bridge.call(lambda: self._cancel(chosen, reason))

    def _cancel(self, chosen: list[StateCore] | None, reason: str | None) -> None:
        running = [core for core in self._cores if not core.is_idle]
        for core in running if chosen is None else chosen:
            core.cancel(reason)

    async def _completed(self) -> AsyncGenerator[S]:
        ended: asyncio.Queue[S] = asyncio.Queue()
        for state in self.states:
            state.core.barrier().add_done_callback(functools.partial(_put, ended, state))
        for _ in self.states:
            yield await ended.get()

    @property
    def _cores(self) -> list[StateCore]:
        return [state.core for state in self.states]

    def _known(self, name: str) -> list[Variable]:
        found = [core.variables.find(name) for core in self._cores]
        if None in found:
            raise KeyError(f"{name} (branch {found.index(None)} has no such name)")
        return [variable for variable in found if variable is not None]

    async def _deltas(self) -> AsyncGenerator[BranchDelta]:
        logs = [core.deltas for core in self._cores]
        async for branch, delta in read_logs(logs, _all_reached(self._cores)):
            yield BranchDelta(branch, delta.name, delta.text, delta.num_tokens)


class Branches(BranchGroup[S]):
    """The branches of `s.fork(n)` in a `def` program."""

    def __getitem__(self, key: int | str) -> Any:
        """`group[i]` is a branch; `group["name"]` blocks and lists the branches' values of that
        name.
        """
        if isinstance(key, str):
            return [self._parent.session.bridge.result(v.value) for v in self._known(key)]
        return self.states[key]

    def join(self, mode: JoinMode = "gather", *, on_error: OnError = "raise") -> None:
        """Wait for all branches and bring what they made to the parent.

        "gather": names become lists in branch order, None where a branch has no such name.
        "concat": their texts since the fork are appended. A failed branch: "raise" raises its error
        (the first in branch order); "keep" puts the error in the place of the values it has not;
        "drop" leaves the branch out.
        """
        mode = _checked_mode(mode, on_error)
        self._parent.session.bridge.wait(_all_reached(self._cores))
        bring(self._parent, self._cores, mode, on_error)

    def as_completed(self) -> Iterator[S]:
        """The branches, each when all that was appended to it so far has run or failed.

        >>> def program(s):
        ...     branches = s.fork(2)
        ...     branches += zipage.gen("x")
        ...     return [branch["x"] for branch in branches.as_completed()]
        >>> zipage.function(program).run(backend=zipage.testing.ScriptedBackend("a")).ret_value
        ['a', 'a']
        """
        return self._parent.session.bridge.iterate(self._completed())

    def deltas(self) -> Iterator[BranchDelta]:
        """What the branches generate, as it comes, until all that is queued has run or failed."""
        return self._parent.session.bridge.iterate(self._deltas())


class AsyncBranches(BranchGroup[S]):
    """The branches of `s.fork(n)` in an `async def` program."""

    def __getitem__(self, key: int | str) -> Any:
        """`group[i]` is a branch; `await group["name"]` lists the branches' values of that name."""
        if isinstance(key, str):
            return asyncio.gather(*(asyncio.wrap_future(v.value) for v in self._known(key)))
        return self.states[key]

    async def join(self, mode: JoinMode = "gather", *, on_error: OnError = "raise") -> None:
        """As Branches.join, awaited."""
        mode = _checked_mode(mode, on_error)
        await _all_reached(self._cores)
        bring(self._parent, self._cores, mode, on_error)

    def as_completed(self) -> AsyncIterator[S]:
        """As Branches.as_completed, with `async for`."""
        return self._completed()

    def deltas(self) -> AsyncIterator[BranchDelta]:
        """As Branches.deltas."""
        return self._deltas()


def _put(ended: "asyncio.Queue[S]", state: S, _: object) -> None:
    ended.put_nowait(state)


def _checked_mode(mode: str, on_error: str) -> JoinMode:
    """ "gather" or "concat", for which SGLang's names may stand too."""
    mode = SGLANG_MODES.get(mode, mode)
    if mode not in ("gather", "concat"):
        raise ValueError(f"join mode {mode!r} must be 'gather' or 'concat'")
    if on_error not in ("raise", "keep", "drop"):
        raise ValueError(f"on_error={on_error!r} must be 'raise', 'keep' or 'drop'")
    return cast("JoinMode", mode)


async def _all_reached(cores: list[StateCore]) -> None:
    for barrier in [core.barrier() for core in cores]:
        await asyncio.wrap_future(barrier)


def bring(parent: StateCore, cores: list[StateCore], mode: JoinMode, on_error: OnError) -> None:
    """The join itself, once every branch has come to its barrier."""
    if parent.trace is not None:
        parent.trace.join(cores, mode)
    failures = [_failure(core) for core in cores]
    for index, failure in enumerate(failures):
        if failure is not None and on_error == "raise":
            _note(failure, f"in branch {index} of {len(cores)}")
            raise failure
    pairs = zip(cores, failures, strict=True)
    alive = [core for core, failure in pairs if failure is None or on_error == "keep"]
    if mode == "concat":
        for core in alive:
            parent.splice(core)
        return
    for name in dict.fromkeys(name for core in alive for name in core.variables.own_names):
        outcomes = [_outcome(core, name) for core in alive]
        values = [outcome.value for outcome in outcomes]
        parent.assign(name, values, [outcome.meta for outcome in outcomes])
    for core in cores:
        core.release()


def _failure(core: StateCore) -> BaseException | None:
    """What ended the branch; else the first of its own values that is missing, one that did not
    parse.
    """
    if core.error is not None:
        return core.error
    own = [core.variables.find(name) for name in core.variables.own_names]
    errors = [variable.value.exception() for variable in own if variable is not None]
    return next((error for error in errors if error is not None), None)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A branch's value of one name and its meta; the error in the place of both where it failed."""

    value: Any
    meta: Any


def _outcome(core: StateCore, name: str) -> Outcome:
    if name not in core.variables.own_names:
        return Outcome(core.error, core.error)
    variable = core.variables.find(name)
    assert variable is not None, f"{name} was written and is not there"
    error = variable.value.exception()
    if error is not None:
        return Outcome(error, error)
    return Outcome(variable.value.result(), variable.meta.result())


def _note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
