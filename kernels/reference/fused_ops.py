"""RMSNorm, rotary embedding and the gated activation, in plain torch.

Knows nothing of models or layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zipage_lang.kernels.reference.kv_store import store_kv, store_ring_queries


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; the mean is taken in float32.

    Args:
        x: [..., size].
        weight: [size], or None: multiplied by nothing.
        eps: added to the mean square.
    """
    # One pass over x for its norm; the rest works on one number per row.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # [..., 1]
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    normed = torch.mul(x, scale).to(x.dtype)
    return normed if weight is None else normed.mul_(weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum.

    Args:
        x, residual: [num_tokens, size].
        weight: [size] or None.

    Returns:
        normed: [num_tokens, size].
        residual: [num_tokens, size], x + residual.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + head_dim / 2) of each head by the angle of its position.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
        k: [num_tokens, num_kv_heads, head_dim].
        cos, sin: [num_tokens, head_dim / 2], of the dtype of q.

    Returns:
        The rotated q and k, contiguous.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [num_tokens, 1, head_dim / 2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)  # [num_tokens, num_heads, head_dim / 2] each
    rotated_low = (low * cos).addcmul_(high, sin, value=-1)
    rotated_high = (high * cos).addcmul_(low, sin)
    return torch.cat([rotated_low, rotated_high], dim=-1)


def turn_back(x: Tensor, angles: Tensor) -> Tensor:
    """Queries or keys without their rotation.

    x: [.., head_dim], after RoPE; angles: [.., head_dim / 2], of its place.
    """
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos + high * sin, high * cos - low * sin], dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [num_tokens, 2 * size], gate in the first half.

    Returns:
        [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)  # [num_tokens, size] each
    return torch.nn.functional.silu(gate).mul_(up)


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    layer_kv: Tensor,
    slots: Tensor,
    ring: Tensor | None = None,
    ring_slots: Tensor | None = None,
) -> Tensor:
    """From the merged projection to q, with K, V and kept queries in their slots.

    Args:
        qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim].
        q_norm_weight, k_norm_weight: [head_dim], RMSNorm over each head; both or neither.
        eps: of the norm.
        cos, sin: [num_tokens, head_dim / 2], of the dtype of qkv.
        layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim]; written.
        slots: int64 [num_tokens]; a token with a negative slot is not stored.
        ring: [num_ring_entries, num_q_heads, head_dim]; a kept token's q is also written there.
        ring_slots: int64 [num_tokens], with `ring`: distinct entries of it, or negative: not kept.

    Returns:
        q: [num_tokens, num_q_heads, head_dim], normed and rotated, contiguous.
    """

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q_norm_weight is not None and k_norm_weight is not None:
            q, k = rms_norm(q, q_norm_weight, eps), rms_norm(k, k_norm_weight, eps)
        return rope(q, k, cos, sin)

    return store_turned(qkv, turned, layer_kv, slots, ring, ring_slots)


def store_turned(
    qkv: Tensor,
    turned: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    layer_kv: Tensor,
    slots: Tensor,
    ring: Tensor | None,
    ring_slots: Tensor | None,
) -> Tensor:
    """`qk_norm_rope_store` with `turned` for norm and rotation of q and k; returns q."""
    num_kv_heads, head_dim = layer_kv.shape[3:]
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    heads = qkv.view(len(qkv), -1, head_dim)  # [num_tokens, all heads, head_dim]
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k = turned(q, k)
    store_kv(layer_kv, slots, k, v)
    if ring is not None:
        assert ring_slots is not None, "a ring needs its slots"
        store_ring_queries(ring, ring_slots, q)
    return q
