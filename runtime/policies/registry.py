"""Every policy by name: the shipped ones, and those that installed packages add; parameters.

A policy is asked for as `name` or `name:parameter=value:parameter=value`; parameters are the
fields of a policy that is a dataclass. Knows nothing of what a policy does.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from zipage_lang.runtime.policies.full import Full
from zipage_lang.runtime.policies.gkv import GKV
from zipage_lang.runtime.policies.h2o import H2O
from zipage_lang.runtime.policies.keydiff import KeyDiff
from zipage_lang.runtime.policies.kvcompress import KVCompress
from zipage_lang.runtime.policies.page import Page
from zipage_lang.runtime.policies.policy import Policy
from zipage_lang.runtime.policies.pyramidkv import PyramidKV
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.rkv import RKV
from zipage_lang.runtime.policies.snapkv import SnapKV
from zipage_lang.runtime.policies.streaming import Streaming
from zipage_lang.runtime.policies.tiers import Tiers
from zipage_lang.runtime.policies.triattention import TriAttention
from zipage_lang.runtime.policies.vase import VaSE
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.policies.zipage2 import Zipage2

ENTRY_POINT_GROUP = "zipage.policies"
SHIPPED: tuple[type, ...] = (
    Full,
    Zipage,
    RKV,
    GKV,
    SnapKV,
    Streaming,
    H2O,
    Random,
    Page,
    KVCompress,
    PyramidKV,
    KeyDiff,
    VaSE,
    TriAttention,
    Tiers,
    Zipage2,
)

_MOST_REMEMBERED = 256  # policies with parameters; they are remade when asked for again
_MOST_SINKS = 64  # a card looks for them one after the other
_MOST_RECENT = 2**20


class Policies(Mapping[str, Policy]):
    """Policies by what a request asks for; iterates over plain names.

    Raises KeyError for an unknown name and ValueError, with the fix, for bad parameters.
    """

    def __init__(self, policies: Iterable[Policy]) -> None:
        self._by_name = {policy.name: policy for policy in policies}
        self._with_parameters: dict[str, Policy] = {}

    def __getitem__(self, asked: str) -> Policy:
        if asked in self._by_name:
            return self._by_name[asked]
        if asked not in self._with_parameters:
            if len(self._with_parameters) >= _MOST_REMEMBERED:
                self._with_parameters.clear()
            self._with_parameters[asked] = self._make(asked)
        return self._with_parameters[asked]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def _make(self, asked: str) -> Policy:
        name, *pairs = asked.split(":")
        base = self._by_name[name]
        known = _parameters(base)
        values: dict[str, Any] = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals or key not in known or key in values:
                raise ValueError(_about_parameter(asked, key, pair, known))
            values[key] = _value(asked, key, text, known[key])
        policy = _replaced(asked, base, values)
        _check_numbers(asked, base, policy)
        return policy


class PolicyQueries(Mapping[str, int]):
    """How many queries the policies score with, by what a request asks for.

    Raises like `Policies`, and ValueError for more queries than the query rings hold.
    """

    def __init__(
        self, policies: Policies, window: int, calibrate: Callable[[Policy], None]
    ) -> None:
        """window: queries that a ring holds. calibrate: called before a policy is answered for."""
        self._policies, self._window, self._calibrate = policies, window, calibrate

    def __getitem__(self, asked: str) -> int:
        policy = self._policies[asked]
        self._calibrate(policy)
        num_queries = policy.num_queries
        if num_queries > self._window:
            raise ValueError(
                f"kv policy {asked!r} scores with {num_queries} queries but this engine keeps "
                f"{self._window}; lower num_queries, or start the engine with that policy"
            )
        return num_queries

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)


def load_policies() -> Policies:
    """Shipped policies, then those of the entry point group.

    An entry point names a policy, or a class or function that makes one without arguments.
    Raises ValueError when it is no policy or takes a name that is already used.
    """
    policies: dict[str, Policy] = {policy.name: policy for policy in (make() for make in SHIPPED)}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        policy = _load(entry)
        if policy.name in policies:
            raise ValueError(
                f"policy {policy.name!r} of entry point {entry.value!r} is already taken by "
                f"{type(policies[policy.name]).__name__}; give it another name"
            )
        policies[policy.name] = policy
    return Policies(policies.values())


def _load(entry: EntryPoint) -> Policy:
    found = entry.load()
    is_instance = isinstance(found, Policy) and not isinstance(found, type)
    policy = found if is_instance or not callable(found) else found()
    if not isinstance(policy, Policy):
        raise ValueError(
            f"entry point {entry.name} = {entry.value!r} of group {ENTRY_POINT_GROUP} is no "
            "policy: it needs name, num_queries, num_recent, num_sinks and score(view)"
        )
    if not policy.name or set(policy.name) & set(":=,"):
        raise ValueError(
            f"policy {policy.name!r} of entry point {entry.value!r} needs a name without : = ,"
        )
    return policy


def _parameters(policy: Policy) -> dict[str, Any]:
    """Name -> default of what a request may set."""
    if not dataclasses.is_dataclass(policy) or isinstance(policy, Full):
        return {}
    fields = (field.name for field in dataclasses.fields(policy) if field.init)
    defaults = {name: getattr(policy, name) for name in fields if name != "name"}
    return {k: v for k, v in defaults.items() if isinstance(v, (bool, int, float, str))}


def _value(asked: str, key: str, text: str, default: Any) -> Any:
    """The text read as what the default is."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, str):
            return text
        number = type(default)(text)
        if math.isfinite(number):
            return number
    except (KeyError, ValueError, OverflowError):
        pass  # said below, with what would be right
    kind = "true or false" if isinstance(default, bool) else type(default).__name__
    raise ValueError(f"kv policy {asked!r}: {key}={text!r} must be of kind {kind}, like {default}")


def _about_parameter(asked: str, key: str, pair: str, known: Mapping[str, Any]) -> str:
    form = "write parameters as name:parameter=value"
    if "=" not in pair:
        return f"kv policy {asked!r}: {pair!r} sets nothing; {form}"
    if key in known:
        return f"kv policy {asked!r} sets {key} twice"
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    names = ", ".join(known) or "none"
    return f"kv policy {asked!r} has no parameter {key!r}; {hint}known: {names}"


def _replaced(asked: str, base: Any, values: Mapping[str, Any]) -> Policy:
    try:
        policy: Policy = dataclasses.replace(base, **values)
    except ValueError as error:
        raise ValueError(f"kv policy {asked!r}: {error}") from error
    return policy


def _check_numbers(asked: str, base: Policy, policy: Policy) -> None:
    """What the compressor relies on, whatever the policy."""
    if (policy.num_queries > 0) != (base.num_queries > 0) or policy.num_queries < 0:
        least = "at least 1" if base.num_queries > 0 else "0"
        raise ValueError(f"kv policy {asked!r}: num_queries={policy.num_queries} must be {least}")
    bounds = {"num_recent": _MOST_RECENT, "num_sinks": _MOST_SINKS}
    for name, most in bounds.items():
        value = getattr(policy, name)
        if not 0 <= value <= most:
            raise ValueError(f"kv policy {asked!r}: {name}={value} must lie between 0 and {most}")
