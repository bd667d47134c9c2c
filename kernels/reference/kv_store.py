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


def store_ring_queries(ring: Tensor, ring_slots: Tensor, q: Tensor) -> None:
    """Keep some of this step's queries for later scoring, in place; slots below 0 are dropped.

    Args:
        ring: [num_entries, num_q_heads, head_dim] of one layer.
        ring_slots: int64 [num_tokens], distinct entries, or negative.
        q: [num_tokens, num_q_heads, head_dim], after RoPE, unscaled.
    """
    tokens = (ring_slots >= 0).nonzero().flatten()  # [num_writes]
    ring.index_copy_(0, ring_slots.index_select(0, tokens), q.index_select(0, tokens))


def store_lse(ring_lse: Tensor, ring_slots: Tensor, lse: Tensor) -> None:
    """Keep the log-sum-exps of those queries, of all layers at once, in place.

    Args:
        ring_lse: float32 [num_layers, num_entries, num_q_heads], base 2.
        ring_slots: int64 [num_tokens], distinct entries, or negative: that token is dropped.
        lse: float32 [num_layers, num_tokens, num_q_heads], base 2.
    """
    tokens = (ring_slots >= 0).nonzero().flatten()  # [num_writes]
    ring_lse.index_copy_(1, ring_slots.index_select(0, tokens), lse.index_select(1, tokens))


def copy_blocks(pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks within each pool, for all layers, in place.

    Args:
        pools: tensors [num_layers, num_blocks, ...].
        src, dst: int64 [num_copies]; all of src is read before any of dst is written.
    """
    for pool in pools:
        pool.index_copy_(1, dst, pool.index_select(1, src))
