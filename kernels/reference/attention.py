"""Paged attention in plain torch: one gather and one fused attention call per group of sequences.

Knows nothing of requests, policies or how the blocks were filled.

Sequences are grouped, not looped over: decodes form one group, prefill chunks of similar length
share one, and a group whose KV lengths differ a lot is split so that padding stays cheap. Within
a group every sequence is padded to the longest. A padded slot is gathered from the sequence's own
slot 0 and masked, so what unused memory holds (even NaN) never enters the arithmetic.
"""

import dataclasses
import math

import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# What one more group costs, in gathered slots: about the overhead of its two launches.
_GROUP_COST = 512
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences that run as one padded batch of `num_seqs` by `q_len` by `kv_len`."""

    num_seqs: int
    q_len: int
    kv_len: int
    tokens: Tensor | None  # int64 [num_seqs * q_len], flat query tokens; None: all, in order
    rows: Tensor  # int64 [2 * num_seqs * kv_len], K rows then V rows of the layer's pool
    mask: Tensor | None  # float32 [num_seqs, 1, q_len, kv_len], 0 or -inf; None: nothing is masked


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index and mask tensors of one step, shared by all layers."""

    groups: tuple[AttentionGroup, ...]
    order: Tensor | None  # int64 [num_tokens], row of each token in the joined outputs; None: as is
    num_kv_heads: int


def plan_attention(
    batch: AttentionBatch, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> AttentionPlan:
    """Turn host metadata into what `attention` needs, once per step.

    Args:
        batch: int32 host tensors; see AttentionBatch. Every sequence has kv_len >= q_len >= 1.
        num_q_heads, num_kv_heads, head_dim, block_size: the shape of queries and pool.
    """
    assert num_q_heads % num_kv_heads == 0, f"{num_q_heads} query heads, {num_kv_heads} KV heads"
    starts, kv_lens = batch.q_starts.long(), batch.kv_lens.long()  # [num_seqs + 1], [num_seqs]
    q_lens = starts.diff()  # [num_seqs]
    assert bool((q_lens >= 1).all() and (kv_lens >= q_lens).all()), f"{q_lens=} {kv_lens=}"
    tables = batch.block_tables.long()  # [num_seqs, max_blocks]
    members = _group_members(q_lens, kv_lens)
    groups = tuple(
        _plan_group(starts[seqs], q_lens[seqs], kv_lens[seqs], tables[seqs], block_size)
        for seqs in members
    )
    return _in_order(groups, int(starts[-1]), num_kv_heads)


def attention(
    q: Tensor,
    layer_kv: Tensor,
    plan: AttentionPlan,
    scale: float,
    need_lse: bool,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of this step's queries over the resident slots of their sequences.

    Args:
        q: [num_tokens, num_q_heads, head_dim], after RoPE, unscaled.
        layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], this step's K and V included.
        plan: from `plan_attention`.
        scale: factor on q.k.
        need_lse: whether the log-sum-exp is wanted.
        lse_out: where it goes, float32 [num_tokens, num_q_heads]; None: new memory.

    Returns:
        out: [num_tokens, num_q_heads, head_dim], dtype of q.
        lse: float32 [num_tokens, num_q_heads], log2 of the sum of exp(scale * q.k), when asked.
    """
    pool = layer_kv.view(-1, layer_kv.shape[3] * layer_kv.shape[4])
    results = [_attend(q, pool, group, plan.num_kv_heads, scale) for group in plan.groups]
    out = _joined([out for out, _ in results], plan.order)  # [num_tokens, num_q_heads, head_dim]
    if not need_lse:
        return out, None
    lse = _joined([lse for _, lse in results], plan.order)  # [num_tokens, num_q_heads]
    return out, torch.mul(lse, _LOG2_E, out=lse_out)


def _attend(
    q: Tensor, pool: Tensor, group: AttentionGroup, num_kv_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One group's outputs [num_seqs * q_len, num_q_heads, head_dim] and natural log-sum-exps."""
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    gathered = pool.index_select(0, group.rows)  # [2 * num_seqs * kv_len, num_kv_heads * head_dim]
    gathered = gathered.view(2, group.num_seqs, group.kv_len, num_kv_heads, head_dim)
    k, v = gathered.transpose(2, 3).unbind(0)  # [num_seqs, num_kv_heads, kv_len, head_dim] each
    if group.tokens is not None:
        q = q.index_select(0, group.tokens)  # [num_seqs * q_len, num_q_heads, head_dim]
    if group.q_len == 1:
        # The query heads of one KV head become query rows: one product reads each key once.
        q = q.view(group.num_seqs, num_kv_heads, -1, head_dim)
    else:
        q = q.view(group.num_seqs, group.q_len, num_q_heads, head_dim).transpose(1, 2)
    mask = group.mask
    if mask is not None:
        mask = mask.expand(-1, -1, q.shape[2], -1)
    out, lse = _flash(q, k, v, attn_mask=mask, scale=scale)
    if group.q_len > 1:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return out.reshape(-1, num_q_heads, head_dim), lse.reshape(-1, num_q_heads)


def _joined(parts: list[Tensor], order: Tensor | None) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined if order is None else joined.index_select(0, order)


def _group_members(q_lens: Tensor, kv_lens: Tensor) -> list[Tensor]:
    """Sequence numbers of each group: equal power-of-two bucket of q_len, then similar kv_len."""
    members = []
    buckets = q_lens.double().log2().ceil().long()  # [num_seqs], 0 for decodes
    for bucket in buckets.unique().tolist():
        seqs = (buckets == bucket).nonzero().flatten()  # [num_seqs of the bucket]
        members += _split_by_kv_len(seqs, kv_lens[seqs])
    return members


def _split_by_kv_len(seqs: Tensor, kv_lens: Tensor) -> list[Tensor]:
    """The cheapest of three splits: none, by octaves and by half octaves of KV length."""
    if len(seqs) * int(kv_lens.max()) - int(kv_lens.sum()) <= _GROUP_COST:
        return [seqs]
    # Lengths below one group's cost are not worth telling apart.
    log_lens = kv_lens.clamp(min=_GROUP_COST).double().log2()  # [num_seqs]
    splits = []
    for steps_per_octave in (0, 1, 2):
        buckets = (log_lens * steps_per_octave).floor()  # [num_seqs]
        parts = [buckets == bucket for bucket in buckets.unique()]
        cost = sum(int(part.sum()) * int(kv_lens[part].max()) + _GROUP_COST for part in parts)
        splits.append((cost, steps_per_octave, parts))
    return [seqs[part] for part in min(splits, key=lambda split: split[:2])[2]]


def _plan_group(
    starts: Tensor, q_lens: Tensor, kv_lens: Tensor, tables: Tensor, block_size: int
) -> AttentionGroup:
    """Indices and mask of the sequences whose metadata is given, one entry or row each."""
    q_len, kv_len = int(q_lens.max()), int(kv_lens.max())
    slot = torch.arange(kv_len)  # [kv_len]
    token = torch.arange(q_len)  # [q_len]
    k_rows = tables[:, slot // block_size] * (2 * block_size) + slot % block_size
    is_real = slot < kv_lens[:, None]  # [num_seqs, kv_len]
    k_rows = torch.where(is_real, k_rows, k_rows[:, :1])  # [num_seqs, kv_len]
    last_token = torch.minimum(token, q_lens[:, None] - 1)  # [num_seqs, q_len]
    last_slot = (kv_lens - q_lens)[:, None] + last_token  # [num_seqs, q_len]
    is_seen = slot <= last_slot[:, :, None]  # [num_seqs, q_len, kv_len]
    mask = None
    if not bool(is_seen.all()):
        mask = torch.zeros(is_seen.shape).masked_fill_(~is_seen, -math.inf)[:, None]
    return AttentionGroup(
        num_seqs=len(starts),
        q_len=q_len,
        kv_len=kv_len,
        tokens=(starts[:, None] + last_token).flatten(),
        rows=torch.stack([k_rows, k_rows + block_size]).flatten(),
        mask=mask,
    )


def _in_order(
    groups: tuple[AttentionGroup, ...], num_tokens: int, num_kv_heads: int
) -> AttentionPlan:
    """Add where each token's output lies; drop the indices that would change nothing."""
    padded = torch.cat(
        [group.tokens for group in groups if group.tokens is not None]
    )  # [sum of num_seqs * q_len]
    order = torch.empty(num_tokens, dtype=torch.long)
    # Padded rows repeat their sequence's last token and compute the same output, so any may win.
    order[padded] = torch.arange(len(padded))
    if len(groups) == 1 and len(padded) == num_tokens:
        whole = dataclasses.replace(groups[0], tokens=None)
        return AttentionPlan((whole,), None, num_kv_heads)
    return AttentionPlan(groups, order, num_kv_heads)
