"""RMSNorm, rotary embedding and the gated activation, in plain torch.

Knows nothing of models or layers.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; the mean is taken in float32.

    Args:
        x: [..., size].
        weight: [size].
        eps: added to the mean square.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # [..., 1]
    return torch.mul(wide, scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum.

    Args:
        x, residual: [num_tokens, size].
        weight: [size].

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


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [num_tokens, 2 * size], gate in the first half.

    Returns:
        [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)  # [num_tokens, size] each
    return torch.nn.functional.silu(gate).mul_(up)
