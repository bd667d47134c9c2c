"""Norm, rotation and stream whose every row has the same bits in any batch, in plain torch.

The acts of `fused_ops.py` and `residual_stream.py`, of operations that are exact per element.
Knows nothing of layers or models.
"""

from torch import Tensor

from zipage_lang.kernels.reference.exact import sum_last
from zipage_lang.kernels.reference.fused_ops import store_turned
from zipage_lang.kernels.reference.residual_stream import ResidualStream


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32, rounded once before the weight.

    x: [.., size]; weight: [size] or None: multiplied by nothing.
    """
    wide = x.float()
    mean = sum_last(wide * wide).mul_(1 / x.shape[-1])  # [.., 1]
    normed = wide.div(mean.add_(eps).sqrt_()).to(x.dtype)
    return normed if weight is None else normed.mul_(weight)


class StrictStream(ResidualStream):
    """A residual stream with the norm of this file."""

    def normed(self, weight: Tensor | None) -> Tensor:
        return rms_norm(self.values, weight, self.eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + head_dim / 2) of each head; shapes as in `fused_ops.rope`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [num_tokens, 1, head_dim / 2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


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

    Arguments as in `fused_ops.qk_norm_rope_store`; returns q [num_tokens, num_q_heads, head_dim].
    """

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q_norm_weight is not None and k_norm_weight is not None:
            q, k = rms_norm(q, q_norm_weight, eps), rms_norm(k, k_norm_weight, eps)
        return rope(q, k, cos, sin)

    return store_turned(qkv, turned, layer_kv, slots, ring, ring_slots)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Products and sums apart: fused into one operation they would round by the vector's width."""
    low, high = x.chunk(2, dim=-1)  # [num_tokens, num_heads, head_dim / 2] each
    rotated = x.new_empty(x.shape)
    rotated_low, rotated_high = rotated.chunk(2, dim=-1)
    rotated_low.copy_((low * cos).sub_(high * sin))
    rotated_high.copy_((high * cos).add_(low * sin))
    return rotated
