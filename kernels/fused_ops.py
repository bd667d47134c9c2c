"""RMSNorm, rotary embedding, the gated activation, and their fusion for attention inputs: Triton.

Same acts as `reference/fused_ops.py`; float32 inside, and one rounding where the twin has more.
No launch waits for the device or allocates by what the data says.
Knows nothing of models or layers.
"""

import torch
import triton
from torch import Tensor

from zipage_lang.kernels.dependent_launch import launch_options
from zipage_lang.kernels.fused_kernels import (
    add_rms_norm_kernel,
    qk_norm_rope_store_kernel,
    rms_norm_kernel,
    rope_kernel,
    silu_mul_kernel,
)

HEADS_PER_PROGRAM = 8  # 1,024 elements at head_dim 128: 16 bytes of bf16 a thread at 4 warps
SILU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; one program a row, the row in registers.

    Moves each element of x in and out once, and the weight from L2.

    Args:
        x: [num_rows, size] or [num_tokens, num_heads, size], last axis contiguous.
        weight: [size], contiguous, dtype of x; None multiplies by nothing.
        eps: added to the mean square.

    Returns:
        Shape of x, contiguous.
    """
    size = x.shape[-1]
    assert x.dim() in (2, 3), (x.shape, x.stride())
    assert x.stride(-1) == 1, (x.shape, x.stride())
    if weight is not None:
        _check_weight(weight, size, x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_inner = x.shape[1] if x.dim() == 3 else 1
    if out.numel():
        rms_norm_kernel[(x.shape[0] * num_inner,)](
            x,
            weight,
            out,
            eps,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            num_inner,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            HAS_WEIGHT=weight is not None,
            num_warps=_num_warps(size),
            **launch_options(x.device),
        )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum; one program a token.

    Moves 4 * size elements a token: x and residual in, the sum and its norm out.

    Args:
        x, residual: [num_tokens, size], last axis contiguous, of one dtype.
        weight: [size], contiguous; None multiplies by nothing.

    Returns:
        normed: [num_tokens, size].
        residual: [num_tokens, size], x + residual.
    """
    num_tokens, size = x.shape
    assert residual.dtype == x.dtype, (residual.dtype, x.dtype)
    assert residual.shape == (num_tokens, size), (residual.shape, x.shape)
    assert x.stride(1) == 1, (x.stride(), residual.stride())
    assert residual.stride(1) == 1, (x.stride(), residual.stride())
    if weight is not None:
        _check_weight(weight, size, x.dtype)
    normed = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    total = torch.empty_like(normed)
    if num_tokens:
        add_rms_norm_kernel[(num_tokens,)](
            x,
            residual,
            weight,
            normed,
            total,
            eps,
            x.stride(0),
            residual.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            HAS_WEIGHT=weight is not None,
            num_warps=_num_warps(size),
            **launch_options(x.device),
        )
    return normed, total


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + head_dim / 2) of each head by the angle of its position.

    Moves q and k in and out once; one launch for each of the two.

    Args:
        q: [num_tokens, num_q_heads, head_dim], last axis contiguous.
        k: [num_tokens, num_kv_heads, head_dim], last axis contiguous.
        cos, sin: [num_tokens, head_dim / 2], contiguous.

    Returns:
        The rotated q and k, contiguous.
    """
    _check_angles(cos, sin, len(q), q.shape[2])
    return _rope_one(q, cos, sin), _rope_one(k, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. Moves 3 * size elements a token.

    Args:
        gate_up: [num_tokens, 2 * size], gate in the first half, last axis contiguous.

    Returns:
        [num_tokens, size].
    """
    return _silu_mul(gate_up, group=0)


def silu_mul_interleaved(gate_up: Tensor, group: int) -> Tensor:
    """`silu_mul` where `group` columns of gate stand before their `group` columns of up, in turn.

    Args:
        gate_up: [num_tokens, 2 * size], last axis contiguous; group divides size.

    Returns:
        [num_tokens, size].
    """
    assert gate_up.shape[1] % (2 * group) == 0, (gate_up.shape, group)
    return _silu_mul(gate_up, group)


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
    """From the merged projection to q, with K, V and kept queries in their slots: one launch.

    Moves the projection in once, and q, K and V out once, and q once more where it is kept:
    2 * (num_q_heads + 2 * num_kv_heads) * head_dim elements a token.

    Args:
        qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], last axis contiguous.
        q_norm_weight, k_norm_weight: [head_dim], RMSNorm over each head; both or neither.
        eps: of the norm.
        cos, sin: [num_tokens, head_dim / 2], contiguous.
        layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], contiguous; written.
        slots: int64 [num_tokens]; a token with a negative slot is not stored.
        ring: [num_ring_entries, num_q_heads, head_dim], contiguous; gets kept tokens' q.
        ring_slots: int64 [num_tokens], with `ring`: distinct entries of it, or negative: not kept.

    Returns:
        q: [num_tokens, num_q_heads, head_dim], normed and rotated, contiguous.
    """
    (num_tokens, size), (num_kv_heads, head_dim) = qkv.shape, layer_kv.shape[3:]
    num_q_heads, dtype = size // head_dim - 2 * num_kv_heads, qkv.dtype
    assert size == (num_q_heads + 2 * num_kv_heads) * head_dim, (qkv.shape, layer_kv.shape)
    assert dtype == layer_kv.dtype, (dtype, layer_kv.dtype)
    assert num_q_heads > 0, (num_q_heads, qkv.stride())
    assert qkv.stride(1) == 1, (num_q_heads, qkv.stride())
    assert layer_kv.shape[1] == 2, (layer_kv.shape, layer_kv.stride())
    assert layer_kv.is_contiguous(), (layer_kv.shape, layer_kv.stride())
    assert slots.shape == (num_tokens,), (slots.shape, slots.dtype)
    assert slots.dtype == torch.int64, (slots.shape, slots.dtype)
    assert slots.is_contiguous(), slots.stride()
    assert (q_norm_weight is None) == (k_norm_weight is None), "norm both q and k, or neither"
    for weight in (q_norm_weight, k_norm_weight):
        if weight is not None:
            _check_weight(weight, head_dim, dtype)
    _check_angles(cos, sin, num_tokens, head_dim)
    _check_ring(ring, ring_slots, (num_tokens, num_q_heads, head_dim), dtype)
    q = torch.empty((num_tokens, num_q_heads, head_dim), dtype=dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    tile = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_q_heads))
    num_groups = triton.cdiv(num_q_heads, tile) + triton.cdiv(num_kv_heads, tile)
    qk_norm_rope_store_kernel[(num_tokens, num_groups)](
        qkv,
        q_norm_weight,
        k_norm_weight,
        eps,
        cos,
        sin,
        q,
        layer_kv,
        slots,
        ring,
        ring_slots,
        qkv.stride(0),
        BLOCK_SIZE=layer_kv.shape[2],
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=tile,
        HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=q_norm_weight is not None,
        HAS_RING=ring is not None,
        num_warps=4,
        **launch_options(qkv.device),
    )
    return q


def _silu_mul(gate_up: Tensor, group: int) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * size, (gate_up.shape,)
    assert gate_up.stride(1) == 1, (gate_up.shape,)
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        silu_mul_kernel[(num_tokens, triton.cdiv(size, SILU_BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            size,
            GROUP=group,
            BLOCK=SILU_BLOCK,
            num_warps=4,
            **launch_options(gate_up.device),
        )
    return out


def _rope_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    assert len(cos) == num_tokens, (cos.shape, x.shape, x.stride())
    assert x.stride(2) == 1, (cos.shape, x.shape, x.stride())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    if num_tokens:
        rope_kernel[(num_tokens, triton.cdiv(num_heads, tile))](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEADS=tile,
            HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
            **launch_options(x.device),
        )
    return out


def _check_ring(
    ring: Tensor | None, ring_slots: Tensor | None, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """shape: of q."""
    assert (ring is None) == (ring_slots is None), "a ring and its slots, or neither"
    if ring is not None and ring_slots is not None:
        assert (ring.shape[1:], ring.dtype) == (shape[1:], dtype), (ring.shape, ring.dtype, shape)
        assert ring.is_contiguous(), (ring.shape, ring.stride())
        assert ring_slots.shape == shape[:1], (ring_slots.shape, shape)
        assert ring_slots.dtype == torch.int64, ring_slots.dtype
        assert ring_slots.is_contiguous(), ring_slots.stride()


def _check_weight(weight: Tensor, size: int, dtype: torch.dtype) -> None:
    assert weight.shape == (size,), (weight.shape, size)
    assert weight.is_contiguous(), (weight.shape, size)
    assert weight.dtype == dtype, (weight.dtype, dtype)


def _check_angles(cos: Tensor, sin: Tensor, num_tokens: int, head_dim: int) -> None:
    assert head_dim % 2 == 0, head_dim
    assert cos.shape == sin.shape == (num_tokens, head_dim // 2), (cos.shape, sin.shape, head_dim)
    assert cos.is_contiguous(), (cos.stride(), sin.stride())
    assert sin.is_contiguous(), (cos.stride(), sin.stride())


def _num_warps(size: int) -> int:
    """16 elements a thread: one row's loads in flight at once, and short reductions."""
    return min(16, max(1, triton.next_power_of_2(size) // 512))
