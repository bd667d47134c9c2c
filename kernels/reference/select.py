"""Which tail slots are kept: protection by position, then the exact top K per row and head.

Knows nothing of where a score comes from or how slots are moved.
"""

import math

import torch
from torch import Tensor

_SIGN_SHIFT = 31
_ALL_BUT_SIGN = 0x7FFF_FFFF
_PADDING_KEY = torch.iinfo(torch.int64).min
_NO_POSITION = torch.iinfo(torch.int32).max


def protect_slots(
    scores: Tensor,
    positions: Tensor,
    lens: Tensor,
    logical_lens: Tensor,
    num_recent: int,
    num_sinks: int,
) -> Tensor:
    """Raise the newest `num_recent` and the oldest `num_sinks` tokens of each tail to +inf.

    Recent means one of the last `num_recent` logical positions; a sink is one of the lowest
    `num_sinks` positions still in that head's tail. Where fewer slots are kept than are protected,
    the tie rule of `select_top_k` keeps the newest of them.

    scores: float32 [num_rows, num_kv_heads, max_tail].
    positions: int32, same shape. lens, logical_lens: int64 [num_rows].
    Returns a new tensor of the scores' shape.
    """
    protected = positions >= (logical_lens - num_recent)[:, None, None]
    if num_sinks > 0:
        protected = protected | _is_sink(positions, lens, num_sinks)
    return scores.masked_fill(protected, math.inf)


def select_top_k(scores: Tensor, positions: Tensor, lens: Tensor, num_keep: Tensor) -> Tensor:
    """Exactly the `num_keep` highest scores of every row and head; of equal scores the newer token.

    Deterministic: score and position are packed into one integer that orders like the pair, so no
    two slots of a head compare equal and one threshold separates kept from dropped.
    A NaN score counts as -inf.

    scores: float32 [num_rows, num_kv_heads, max_tail]; what padding holds does not matter.
    positions: int32, same shape, distinct within the real slots of a row and head.
    lens: int64 [num_rows], real slots. num_keep: int64 [num_rows], 1 <= num_keep <= lens.
    Returns bool, same shape; padding is False.
    """
    keys = (_order_of(scores) << 32) | positions.long()  # [num_rows, num_kv_heads, max_tail]
    keys = keys.masked_fill(_padding(keys, lens), _PADDING_KEY)
    ranked = keys.sort(dim=-1, descending=True).values
    last_kept = (num_keep - 1)[:, None, None].expand(-1, keys.shape[1], 1)
    return keys >= ranked.gather(-1, last_kept)


def _order_of(scores: Tensor) -> Tensor:
    """int64 in the range of an int32 that orders as the float32 scores do."""
    clean = torch.where(scores.isnan(), -math.inf, scores) + 0.0  # + 0.0 makes -0.0 equal 0.0
    bits = clean.float().contiguous().view(torch.int32)
    return (bits ^ ((bits >> _SIGN_SHIFT) & _ALL_BUT_SIGN)).long()


def _is_sink(positions: Tensor, lens: Tensor, num_sinks: int) -> Tensor:
    real = positions.masked_fill(_padding(positions, lens), _NO_POSITION)
    num_lowest = min(num_sinks, positions.shape[-1])
    lowest = real.topk(num_lowest, dim=-1, largest=False).values
    return real <= lowest.amax(dim=-1, keepdim=True)


def _padding(values: Tensor, lens: Tensor) -> Tensor:
    """bool [num_rows, 1, max_tail]: slots past a row's tail."""
    return (torch.arange(values.shape[-1], device=values.device) >= lens[:, None])[:, None]
