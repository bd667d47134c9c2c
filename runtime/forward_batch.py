"""ForwardBatch: one step's tokens as device tensors, as the models take them.

Knows nothing of requests, the scheduler or what the tokens mean.
"""

import dataclasses
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass: decodes and prefill chunks side by side, flat over tokens."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens], logical positions
    slots: Tensor  # int64 [num_tokens], block_id * block_size + offset the token's K and V go to
    attention_plan: Any  # from Backend.plan_attention
    # int64 [num_tokens]: query_slot * window + position % window, the ring entry a token's query is
    # kept in for later scoring, all distinct; -1: not kept. None: no query of this step is kept
    ring_slots: Tensor | None
    # int64 [num_wanted], the tokens whose final hidden state is read. None: those of all tokens
    wanted: Tensor | None
    logits_index: Tensor  # int64 [num_logits], which of the wanted states logits are made of
