"""How one request's KV cache is bounded: what a caller may ask for, and what it resolves to.

Knows nothing of blocks, tensors or how a policy scores.
"""

import dataclasses
import hashlib
from typing import Any, Literal

from zipage_lang.runtime.documented import documented
from zipage_lang.runtime.strict_fields import strict_fields

Mode = Literal["off", "fixed", "adaptive"]
Protect = Literal["prompt", "none"]
Reuse = Literal["compacted", "exact"]

_CHOICES = {
    "mode": ("off", "fixed", "adaptive"),
    "protect": ("prompt", "none"),
    "reuse": ("compacted", "exact"),
}


def check_kv_field(name: str, value: Any) -> None:
    """Raise ValueError when a KV field is out of range."""
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"kv {name}={value!r} must be one of {', '.join(_CHOICES[name])}")
    if name in ("budget", "interval") and not _is_whole(value, 1):
        raise ValueError(f"kv {name}={value!r} must be a whole number of tokens, at least 1")
    if name == "policy" and (not isinstance(value, str) or not value):
        raise ValueError(f"kv policy={value!r} must be the name of a policy")
    if name == "protected_len" and not _is_whole(value, 0):
        raise ValueError(f"kv protected_len={value!r} must be a whole number of tokens")


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**31


@strict_fields("kv field")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVParams:
    """What a caller asks for; a field that is None takes the engine's default.

    Parameters: the fields below. Errors: ValueError for an unknown field or a value out of range.

    >>> zipage.KV(mode="fixed", budget=256).budget
    256
    """

    mode: Mode | None = documented(
        None, "off, fixed: compact when due, adaptive: only under pressure"
    )
    budget: int | None = documented(None, "K: tail tokens kept per (layer, KV head)")
    interval: int | None = documented(None, "E: tail tokens that may pile up on top of K")
    policy: str | None = documented(None, "a name, or name:parameter=value:.. (docs/policies.md)")
    protect: Protect | None = documented(None, "none: the prompt competes too, as in the paper")
    protected_len: int | None = documented(
        None, "leading tokens never compacted; None: the whole prompt"
    )
    reuse: Reuse | None = documented(
        None, "exact: never continue from a compacted node of the tree"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_kv_field(field.name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVSettings:
    """One request's settings with every default filled in."""

    mode: Mode
    budget: int
    interval: int
    policy: str
    protected_len: int
    reuse: Reuse

    @property
    def compacts(self) -> bool:
        return self.mode != "off"

    @property
    def max_tail_len(self) -> int:
        """Tail tokens at which the request is due: K + E."""
        return self.budget + self.interval

    def signature(self) -> str:
        """Names all that a compacted state depends on; equal ones may share compacted nodes."""
        text = f"{self.mode}/{self.policy}/{self.budget}/{self.interval}/{self.protected_len}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
