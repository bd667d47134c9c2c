"""The settings of a sweep: policies x budgets x intervals x modes x protection.

Knows nothing of engines or problems.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from zipage_lang.runtime.kv_params import KVParams


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """A number of tokens, or a share of the mean full-KV solution length."""

    tokens: int = 0
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """`128` or `12%`. Raises ValueError for anything else."""
        number = text.strip().removesuffix("%")
        try:
            value = float(number) if text.strip().endswith("%") else int(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"{text!r} is no amount: give tokens such as 128, or a share of the mean full-KV "
                "solution length such as 12%"
            )
        is_share = text.strip().endswith("%")
        return cls(share=value / 100) if is_share else cls(tokens=int(value))

    def resolve(self, mean_len: float | None) -> int:
        """Tokens, at least one. `mean_len` is needed for a share only."""
        if self.share is None:
            return self.tokens
        assert mean_len is not None, f"a share of {self.share} needs the mean full-KV length"
        return max(1, round(self.share * mean_len))

    def __str__(self) -> str:
        return str(self.tokens) if self.share is None else f"{100 * self.share:g}%"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How one cell bounds its KV cache."""

    mode: str
    policy: str = ""  # as a request asks for it: `rkv` or `rkv:mass_weight=0.5`
    budget: int = 0
    interval: int = 0
    protect: str = ""
    asked_budget: str = ""  # as the sweep named it: "128" or "12%"

    @property
    def is_full(self) -> bool:
        return self.mode == "off"

    @property
    def name(self) -> str:
        """Short, unique among settings of a task, and fit for a file name."""
        if self.is_full:
            return "off"
        policy = self.policy.replace(":", "_")
        return f"{policy}-k{self.budget}-e{self.interval}-{self.mode}-{self.protect}"

    def kv(self) -> KVParams:
        """What each request of the cell asks for."""
        if self.is_full:
            return KVParams(mode="off")
        fields: dict[str, Any] = {
            "mode": self.mode,
            "policy": self.policy,
            "budget": self.budget,
            "interval": self.interval,
            "protect": self.protect,
        }
        return KVParams(**fields)


FULL = Setting(mode="off")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What a sweep varies; full KV is not in it, since it is always run."""

    policies: tuple[str, ...] = ()
    budgets: tuple[Amount, ...] = ()
    intervals: tuple[Amount, ...] = ()
    modes: tuple[str, ...] = ("fixed",)
    protects: tuple[str, ...] = ("prompt",)

    def __post_init__(self) -> None:
        if self.policies and not self.budgets:
            raise ValueError("policies need budgets to run at; give --budget, say 64,128 or 12%")
        for setting in self.settings(mean_len=1000.0):
            setting.kv()  # raises for what no engine takes

    @property
    def needs_mean_len(self) -> bool:
        return any(amount.share is not None for amount in (*self.budgets, *self.intervals))

    def settings(self, mean_len: float | None) -> list[Setting]:
        """Every combination once; shares that come to the same number of tokens are one."""
        found: dict[str, Setting] = {}
        for setting in self._combinations(mean_len):
            found.setdefault(setting.name, setting)
        return list(found.values())

    def _combinations(self, mean_len: float | None) -> Iterator[Setting]:
        for policy, mode, protect, interval, budget in itertools.product(
            self.policies, self.modes, self.protects, self.intervals, self.budgets
        ):
            yield Setting(
                mode=mode,
                policy=policy,
                budget=budget.resolve(mean_len),
                interval=interval.resolve(mean_len),
                protect=protect,
                asked_budget=str(budget),
            )


def split_list(text: str) -> tuple[str, ...]:
    """The non-empty items of a comma-separated list."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def parse_amounts(text: str) -> tuple[Amount, ...]:
    """A comma-separated list of amounts. Raises ValueError."""
    return tuple(Amount.parse(item) for item in split_list(text))


def parse_value(text: str) -> Any:
    """A number, true, false or the text itself."""
    words: dict[str, Any] = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_choices(name: str, values: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The values, each known. Raises ValueError that names the option."""
    for value in values:
        if value not in known:
            raise ValueError(f"--{name} {value!r} must be one of {', '.join(known)}")
    return tuple(values)
