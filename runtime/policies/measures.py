"""Measures that policies share: shares of a total, pooling in token order, lots, checked numbers.

Knows nothing of any one policy.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zipage_lang.kernels.reference import tiers
from zipage_lang.runtime.policies.policy import TailView

CHOSEN = 1e30  # a score above all others but that of protected slots
_TINY = 1e-30
_BEHIND = torch.iinfo(torch.int32).max


def before_recent(view: TailView, num_recent: int) -> Tensor:
    """bool [num_rows, num_kv_heads, max_tail]: real slots older than the `num_recent` newest."""
    old = view.positions < (view.logical_lens - num_recent)[:, None, None]
    return old & view.valid[:, None]


def share_of_total(score: Tensor, counted: Tensor) -> Tensor:
    """Score over its sum per row and head; 0 where not counted. Both as `before_recent`."""
    score = score.masked_fill(~counted, 0.0)
    return score / score.sum(-1, keepdim=True).clamp(min=_TINY)


def share_of_highest(score: Tensor, counted: Tensor) -> Tensor:
    """Score over its maximum per row and head; 0 where not counted. Scores are at least 0."""
    score = score.masked_fill(~counted, 0.0)
    return score / score.amax(-1, keepdim=True).clamp(min=_TINY)


def pool_in_token_order(view: TailView, score: Tensor, kernel: int) -> Tensor:
    """Each slot takes the highest score among itself and the kernel // 2 resident tokens before
    and behind it in the text, per head. Compactions leave slots in no such order, so it is sorted.

    score: float32 [num_rows, num_kv_heads, max_tail]. kernel: odd. Returns the same shape.
    """
    if kernel == 1:
        return score
    padding = ~view.valid[:, None]
    order = view.positions.masked_fill(padding, _BEHIND).argsort(dim=-1)
    in_order = score.masked_fill(padding, -math.inf).gather(-1, order)
    pooled = F.max_pool1d(in_order, kernel, stride=1, padding=kernel // 2)
    return torch.empty_like(score).scatter_(-1, order, pooled)


def lots(view: TailView, *, fresh: bool) -> Tensor:
    """A lot in [0, 1) for every token, float32 of the positions' shape; see the kernel's `lots`.

    fresh: drawn anew at each compaction; else a token has one lot for good.
    """
    seeds = view.seeds if fresh else torch.zeros_like(view.seeds)
    return tiers.lots(seeds, view.layers, view.positions)


def counts_of(share: float, of: Tensor) -> Tensor:
    """int64 [num_rows]: so many whole slots, rounded down."""
    return (of.double() * share).floor().long()


def require(policy: Any, low: float, high: float, *names: str) -> None:
    """Raise ValueError for parameters outside [low, high] (or NaN)."""
    for name in names:
        value = getattr(policy, name)
        if not low <= value <= high:
            raise ValueError(f"{name}={value!r} must lie between {low} and {high}")


def require_odd(policy: Any, *names: str) -> None:
    """Raise ValueError for pooling kernels that cannot be centred on a slot."""
    for name in names:
        value = getattr(policy, name)
        if value % 2 == 0 or not 1 <= value <= 31:
            raise ValueError(f"{name}={value} must be odd, from 1 (no pooling) to 31")
