"""Paged attention on the card in plain torch: for float32, which FlashInfer does not attend in.

For tests and tiny models; it gathers every key and builds all scores.
Knows nothing of requests, policies or how the blocks were filled.
"""

import dataclasses
import math

import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.reference import attention as reference
from zipage_lang.kernels.reference.attention import AttentionGroup, AttentionPlan

_LOG2_E = math.log2(math.e)


class DenseAttention:
    """The CPU twin's grouping and masks, with the products written out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan_attention(
        self,
        batch: AttentionBatch,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> AttentionPlan:
        """As `reference.attention.plan_attention`, with the plan's tensors on the device."""
        plan = reference.plan_attention(batch, num_q_heads, num_kv_heads, head_dim, block_size)
        return AttentionPlan(
            groups=tuple(self._to_device(group) for group in plan.groups),
            order=None if plan.order is None else plan.order.to(self._device),
            num_kv_heads=plan.num_kv_heads,
        )

    def attention(
        self,
        q: Tensor,
        layer_kv: Tensor,
        plan: AttentionPlan,
        scale: float,
        need_lse: bool,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `reference.attention.attention`."""
        pool = layer_kv.view(-1, *layer_kv.shape[3:])  # [num_rows, num_kv_heads, head_dim]
        results = [_attend(q, pool, group, scale) for group in plan.groups]
        out = torch.cat([part for part, _ in results])  # [num_tokens, num_q_heads, head_dim]
        lse = torch.cat([part for _, part in results])  # [num_tokens, num_q_heads]
        if plan.order is not None:
            out, lse = out[plan.order], lse[plan.order]
        if not need_lse:
            return out, None
        return out, torch.mul(lse, _LOG2_E, out=lse_out)

    def _to_device(self, group: AttentionGroup) -> AttentionGroup:
        return dataclasses.replace(
            group,
            tokens=None if group.tokens is None else group.tokens.to(self._device),
            rows=group.rows.to(self._device),
            mask=None if group.mask is None else group.mask.to(self._device),
        )


def _attend(q: Tensor, pool: Tensor, group: AttentionGroup, scale: float) -> tuple[Tensor, Tensor]:
    """One group's outputs [num_seqs * q_len, num_q_heads, head_dim] and natural log-sum-exps."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = pool.shape[1]
    if group.tokens is not None:
        q = q[group.tokens]  # [num_seqs * q_len, num_q_heads, head_dim]
    # In the KV head's group, query heads stand beside each other.
    q = q.view(group.num_seqs, group.q_len, num_kv_heads, -1, head_dim)
    gathered = pool[group.rows].view(2, group.num_seqs, group.kv_len, num_kv_heads, head_dim)
    keys, values = gathered.float().unbind(0)  # [num_seqs, kv_len, num_kv_heads, head_dim] each
    scores = torch.einsum("sqhgd,skhd->shgqk", q.float(), keys) * scale
    if group.mask is not None:
        scores = scores + group.mask[:, :, None]  # [num_seqs, num_kv_heads, group, q_len, kv_len]
    lse = scores.logsumexp(-1)  # [num_seqs, num_kv_heads, group, q_len]
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("shgqk,skhd->sqhgd", weights, values).to(q.dtype)
    return (
        out.reshape(-1, num_q_heads, head_dim),
        lse.permute(0, 3, 1, 2).reshape(-1, num_q_heads),
    )
