"""From what a program appends to what will run, with all decided that can be at that time.

So a mistake is raised where the program makes it, and each call's seed depends on its place alone.
Knows nothing of queues, tokens or requests.
"""

import dataclasses
from typing import Any

from zipage_lang.backend import Limited
from zipage_lang.ir import (
    Expr,
    Gen,
    Keep,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Score,
    Select,
    Text,
    parts_of,
)
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.seeds import Path, derive_seed
from zipage_lang.session import RunSettings, merge_kv
from zipage_lang.thoughts import THINKING_SUFFIX
from zipage_lang.variables import Variable


@dataclasses.dataclass(frozen=True, eq=False)
class GenCall:
    """A gen with everything decided but its prompt. `thinking` takes what separate_reasoning took
    out.
    """

    node: Gen
    sampling: SamplingParams
    kv: KVParams
    variable: Variable
    thinking: Variable | None = None

    @property
    def variables(self) -> list[Variable]:
        """The values that this call fills, or fails."""
        return [self.variable] if self.thinking is None else [self.variable, self.thinking]


@dataclasses.dataclass(frozen=True, eq=False)
class SelectCall:
    """A select, or a score."""

    node: Select | Score
    kv: KVParams
    variable: Variable

    @property
    def variables(self) -> list[Variable]:
        return [self.variable]


@dataclasses.dataclass(frozen=True, eq=False)
class ScopeClose:
    """The end of a var_scope, whose text goes into the variable."""

    variable: Variable

    @property
    def variables(self) -> list[Variable]:
        return [self.variable]


Call = GenCall | SelectCall | ScopeClose
Planned = Text | Keep | RoleBegin | RoleEnd | ScopeBegin | Call


class Planner:
    """Plans one state's expressions in the order in which they are appended.

    Raises UnsupportedError for what the run's backend can't do, where it is appended.
    """

    def __init__(self, settings: RunSettings, path: Path, kv: KVParams) -> None:
        self.open_role: str | None = None
        self._settings = settings
        self._limits = settings.backend if isinstance(settings.backend, Limited) else None
        self._path = path
        self._kv = kv
        self._num_calls = 0
        self._num_forks = 0

    def plan(self, value: Any) -> list[Planned]:
        """Raises ValueError for what can't be appended here, and then nothing has changed."""
        parts = parts_of(value)
        role = self._role_after(parts)
        call_index = self._num_calls
        planned = []
        for part in parts:
            planned.append(self._plan_part(part, call_index))
            call_index += isinstance(part, Gen | Select | Score)
        self._num_calls, self.open_role = call_index, role
        return planned

    def fork(self, num_branches: int, kv: KVParams | None) -> "list[Planner]":
        """Planners for branches that go on from here."""
        if isinstance(num_branches, bool) or not isinstance(num_branches, int) or num_branches < 1:
            raise ValueError(f"fork({num_branches!r}): give a whole number of at least 1 branch")
        branch_kv = merge_kv(self._kv, kv)
        branches = []
        for index in range(num_branches):
            path = (*self._path, "fork", self._num_forks, index)
            branch = Planner(self._settings, path, branch_kv)
            branch.open_role = self.open_role
            branches.append(branch)
        self._num_forks += 1
        return branches

    def _role_after(self, parts: tuple[Expr, ...]) -> str | None:
        role = self.open_role
        for part in parts:
            match part:
                case RoleBegin(begun) if role is not None:
                    raise ValueError(f"{begun} message inside a {role} message; close that first")
                case RoleBegin(begun):
                    role = begun
                case RoleEnd(ended) if role != ended:
                    raise ValueError(f"{ended} message closed, but {role or 'none'} is open")
                case RoleEnd():
                    role = None
        return role

    def _plan_part(self, part: Expr, call_index: int) -> Planned:
        match part:
            case RoleBegin():
                if self._limits is not None:
                    self._limits.check_role()
                return part
            case Text() | Keep() | RoleEnd() | ScopeBegin():
                return part
            case ScopeEnd(name):
                return ScopeClose(Variable(name))
            case Gen():
                return self._plan_gen(part, call_index)
            case Select(name) | Score(name):
                if self._limits is not None:
                    self._limits.check_select(part.method, self._kv)
                return SelectCall(part, self._kv, Variable(name, call_index))
        raise AssertionError(f"no rule for {part!r}")

    def _plan_gen(self, node: Gen, call_index: int) -> GenCall:
        name, thinking = node.name or "", None
        if node.thoughts is not None and name:
            thinking = Variable(name + THINKING_SUFFIX, call_index)
        call = GenCall(
            node,
            self._sampling(node, call_index),
            merge_kv(self._kv, node.kv),
            Variable(name, call_index),
            thinking,
        )
        if node.stop_pattern is not None and call.sampling.n > 1:
            raise ValueError(f"stop_regex goes with n=1, not n={call.sampling.n}")
        if self._limits is not None:
            self._limits.check_gen(call.sampling, call.kv)
        return call

    def _sampling(self, node: Gen, call_index: int) -> SamplingParams:
        sampling = node.sampling(self._settings.sampling)
        if sampling.seed is not None:
            return sampling
        seed = derive_seed(self._settings.root_seed, (*self._path, "call", call_index))
        return sampling.replace(seed=seed)
