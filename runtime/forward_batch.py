"""ForwardBatch: one step's tokens as device tensors, as the models take them.

Knows nothing of requests, the scheduler or what the tokens mean.
"""

import dataclasses
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class QueryWrites:
    """Which of the step's queries go into which ring entries, for later scoring."""

    token_index: Tensor  # int64 [num_writes], into the step's flat tokens
    ring_slots: Tensor  # int64 [num_writes], query_slot * window + position % window


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass: decodes and prefill chunks side by side, flat over tokens."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens], logical positions
    slots: Tensor  # int64 [num_tokens], block_id * block_size + offset the token's K and V go to
    attention_plan: Any  # from Backend.plan_attention
    query_writes: QueryWrites | None  # None: no query of this step is kept
    logits_index: Tensor  # int64 [num_logits], the tokens whose logits are wanted
