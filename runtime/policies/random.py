"""The `random` policy: prompt and newest tokens kept, the rest by lot (arXiv 2609.03430).

Knows nothing of keys, queries or attention.

The lot of a token is a hash of (seed, layer, KV head, position): it depends neither on the batch
nor on the slot the token lies in, and a replayed plan draws the same again.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.runtime.policies.policy import Scores, TailView

_LOW_32_BITS = 0xFFFF_FFFF
_FRACTION_BITS = 24  # what a float32 holds exactly


@dataclasses.dataclass(frozen=True)
class Random:
    """Uniform noise per (layer, KV head, token): the null baseline that others must beat."""

    name: str = "random"
    num_queries: int = 0
    num_recent: int = 64
    num_sinks: int = 0

    def score(self, view: TailView) -> Scores:
        heads = torch.arange(view.positions.shape[1], device=view.positions.device)
        state = _mix(view.seeds & _LOW_32_BITS)  # [num_rows]
        state = _mix(state ^ ((view.seeds >> 32) & _LOW_32_BITS))
        state = _mix(state ^ view.layers)
        state = _mix(state[:, None] ^ heads)  # [num_rows, num_kv_heads]
        state = _mix(state[..., None] ^ view.positions.long())
        return Scores(keep=(state >> (32 - _FRACTION_BITS)).float() / 2.0**_FRACTION_BITS)


def _mix(state: Tensor) -> Tensor:
    """One round of a 32-bit integer hash (xor-shift and odd multipliers), in int64 arithmetic.

    The offset keeps 0 from hashing to 0. Only the low 32 bits of a product are used, and those
    survive int64 overflow.
    """
    state = (state + 0x9E37_79B9) & _LOW_32_BITS
    state = ((state ^ (state >> 16)) * 0x7FEB_352D) & _LOW_32_BITS
    state = ((state ^ (state >> 15)) * 0x846C_A68B) & _LOW_32_BITS
    return state ^ (state >> 16)
