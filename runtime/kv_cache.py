"""The KV cache's tensors, allocated here only: K and V of all blocks, slot state, query rings.

Knows nothing of who owns which block.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The model's share in the cache's shape."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers: K, V, and slot state (global score, position)."""
        per_slot = 2 * self.head_dim * self.dtype.itemsize + 8
        return self.num_layers * block_size * self.num_kv_heads * per_slot


class KVCache:
    """All layers in one tensor each, so that one launch can move slots of every layer.

    Block 0 is the dummy: padding is written there and never read.
    """

    kv: Tensor  # [num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim] (FlashInfer's NHD)
    score: Tensor  # float32 [num_layers, num_blocks, block_size, num_kv_heads], global score F
    position: Tensor  # int32 [num_layers, num_blocks, block_size, num_kv_heads], logical position
    queries: Tensor  # [num_layers, num_query_slots * window, num_q_heads, head_dim]
    query_lse: Tensor  # float32 [num_layers, num_query_slots * window, num_q_heads], base 2

    def __init__(
        self,
        shape: KVShape,
        *,
        num_blocks: int,
        block_size: int,
        num_query_slots: int,
        window: int,
        device: torch.device,
    ) -> None:
        layers, heads = shape.num_layers, shape.num_kv_heads
        self.shape, self.block_size, self.window = shape, block_size, window
        self.num_blocks = num_blocks  # including the dummy block 0
        self.kv = torch.zeros(
            (layers, num_blocks, 2, block_size, heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        state = (layers, num_blocks, block_size, heads)
        self.score = torch.zeros(state, dtype=torch.float32, device=device)
        self.position = torch.zeros(state, dtype=torch.int32, device=device)
        rings = (layers, num_query_slots * window, shape.num_q_heads)
        self.queries = torch.zeros((*rings, shape.head_dim), dtype=shape.dtype, device=device)
        self.query_lse = torch.zeros(rings, dtype=torch.float32, device=device)

    @property
    def block_pools(self) -> list[Tensor]:
        """Every tensor whose axis 1 is the block: what a block copy or a swap must move."""
        return [self.kv, self.score, self.position]
