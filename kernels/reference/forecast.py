"""A linear forecast of how strongly any later query will attend to a slot.

Knows nothing of how the weights were found, of policies or of which slots are kept.
"""

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Forecast
from zipage_lang.kernels.reference.fused_ops import turn_back
from zipage_lang.kernels.reference.scores import gather_keys, gather_values
from zipage_lang.kernels.reference.tails import stored_history

_PIECE_BYTES = 64 * 2**20  # scratch of one piece, which gathers keys, values and weights
_PIECE_VECTORS = 10  # of head_dim float32 numbers that are alive at once per slot and head


def forecast_scores(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    stateful_lens: Tensor,
    logical_lens: Tensor,
    layers: Tensor,
    forecast: Forecast,
) -> tuple[Tensor, Tensor]:
    """The forecast of each named slot, and the part of it that does not change with age.

        base  = weight_key . key before its rotation + weight_value . value
        score = base + weight_age * log(1 + tokens since)

    The first `stateful_lens` slots of a row have their base in `score_blocks`, so neither their
    keys nor their values are read.

    kv_blocks: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys after RoPE at index 0 of
        axis 1.
    score_blocks: float32 [num_blocks, block_size, num_kv_heads].
    slots: int64 [num_rows, max_tail], padding -1.
    positions: int32 [num_rows, num_kv_heads, max_tail], logical positions, by which the stored keys
        are rotated.
    stateful_lens, logical_lens, layers: int64 [num_rows].
    Returns (score, base), float32 [num_rows, num_kv_heads, max_tail]; padding gets 0 in both.
    """
    real = slots >= 0  # [num_rows, max_tail]
    history = stored_history(score_blocks, slots, stateful_lens)
    base = history.masked_fill(~real[:, None], 0.0).contiguous()
    index = torch.arange(slots.shape[1], device=slots.device)
    rows, places = (real & (index >= stateful_lens[:, None])).nonzero(as_tuple=True)
    num_kv_heads, head_dim = kv_blocks.shape[3:]
    step = max(1, _PIECE_BYTES // (4 * _PIECE_VECTORS * num_kv_heads * head_dim))
    for row, place in zip(rows.split(step), places.split(step), strict=True):
        base[row, :, place] = _new_base(
            kv_blocks, slots[row, place], positions[row, :, place], layers[row], forecast
        )
    num_since = (logical_lens[:, None, None] - 1 - positions).float()
    aged = base + _of_age(num_since, forecast.age[layers][..., None])
    return aged.masked_fill_(~real[:, None], 0.0), base


def _new_base(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, layers: Tensor, forecast: Forecast
) -> Tensor:
    """Bases from keys and values, [num_slots, num_kv_heads]. positions: of that shape.

    slots, layers: int64 [num_slots].
    """
    one_row = slots[None]  # [1, num_slots]
    keys = gather_keys(kv_blocks, one_row)[0].transpose(0, 1)  # [num_slots, heads, head_dim]
    values = gather_values(kv_blocks, one_row)[0].transpose(0, 1)
    keys = turn_back(keys, positions.float()[..., None] * forecast.frequencies)
    found = (keys * forecast.key[layers]).sum(-1)  # [num_slots, num_kv_heads]
    return found + (values * forecast.value[layers]).sum(-1)


def _of_age(num_since: Tensor, weight: Tensor) -> Tensor:
    """What the tokens that came since change in the forecast. Both float32."""
    return weight * torch.log1p(num_since)
