"""Writes keys, values and queries into their slots, and copies whole blocks, in plain torch.

Knows nothing of who owns a block.
"""

import torch
from torch import Tensor


def store_kv(layer_kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write this step's keys and values into one layer's pool, in place; slots below 0 are dropped.

    Args:
        layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim].
        slots: int64 [num_tokens], block_id * block_size + offset, or negative (a padded batch).
        k, v: [num_tokens, num_kv_heads, head_dim].
    """
    if len(slots) and int(slots.min()) < 0:
        is_kept = slots >= 0  # [num_tokens]
        slots, k, v = slots[is_kept], k[is_kept], v[is_kept]
    block_size = layer_kv.shape[2]
    pool = layer_kv.view(-1, layer_kv.shape[3] * layer_kv.shape[4])
    blocks = torch.div(slots, block_size, rounding_mode="floor")  # [num_tokens]
    k_rows = torch.add(slots, blocks, alpha=block_size)  # [num_tokens]
    pool.index_copy_(0, k_rows, k.reshape(-1, pool.shape[1]))
    # A slot's value lies block_size rows behind its key.
    pool[block_size:].index_copy_(0, k_rows, v.reshape(-1, pool.shape[1]))


def store_queries(
    ring: Tensor,
    ring_lse: Tensor,
    ring_slots: Tensor,
    token_index: Tensor,
    q: Tensor,
    lse: Tensor,
) -> None:
    """Keep some of this step's queries and their log-sum-exps, in place; slots below 0 are dropped.

    Args:
        ring: [num_entries, num_q_heads, head_dim] of one layer.
        ring_lse: float32 [num_entries, num_q_heads], base 2.
        ring_slots: int64 [num_writes], entries written to, or negative (a padded batch).
        token_index: int64 [num_writes], which of this step's tokens go there; not read where the
            slot is negative.
        q: [num_tokens, num_q_heads, head_dim], after RoPE, unscaled.
        lse: float32 [num_tokens, num_q_heads], base 2.
    """
    if len(ring_slots) and int(ring_slots.min()) < 0:
        is_kept = ring_slots >= 0  # [num_writes]
        ring_slots, token_index = ring_slots[is_kept], token_index[is_kept]
    ring.index_copy_(0, ring_slots, q.index_select(0, token_index))
    ring_lse.index_copy_(0, ring_slots, lse.index_select(0, token_index))


def copy_blocks(pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks within each pool, for all layers, in place.

    Args:
        pools: tensors [num_layers, num_blocks, ...].
        src, dst: int64 [num_copies]; all of src is read before any of dst is written.
    """
    for pool in pools:
        pool.index_copy_(1, dst, pool.index_select(1, src))
