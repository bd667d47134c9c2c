"""Steps of several sequences, and the check that each of their tokens attends alike when alone.

Knows nothing of whose kernels are checked.
"""

from collections.abc import Iterator
from typing import Any

import torch

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.reference import attention as plain_attention

HEADS = [(9, 3, 16), (4, 4, 64), (8, 1, 128), (6, 2, 20)]  # query heads, KV heads, head size
SEQUENCES = [(1, 5), (1, 150), (1, 64), (40, 40), (23, 100), (3, 65), (1, 1)]  # q_len, kv_len


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def steps(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """A step of several sequences over a pool whose unused slots hold NaN: q, layer_kv, batch."""
    num_q_heads, num_kv_heads, head_dim = heads
    num_blocks = [-(-kv_len // block_size) for _, kv_len in SEQUENCES]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(5)) + 1
    tables = torch.full((len(SEQUENCES), max(num_blocks)), -1, dtype=torch.int32)
    shape = (sum(num_blocks) + 1, 2, block_size, num_kv_heads, head_dim)
    layer_kv = drawn(*shape, seed=1, dtype=dtype)
    start = 0
    for line, ((_, kv_len), count) in enumerate(zip(SEQUENCES, num_blocks, strict=True)):
        tables[line, :count] = order[start : start + count]
        used = kv_len - (count - 1) * block_size
        layer_kv[order[start + count - 1], :, used:] = float("nan")
        start += count
    starts = torch.tensor([0, *(q_len for q_len, _ in SEQUENCES)]).cumsum(0).int()
    kv_lens = torch.tensor([kv_len for _, kv_len in SEQUENCES], dtype=torch.int32)
    q = drawn(int(starts[-1]), num_q_heads, head_dim, seed=2, dtype=dtype)
    return q, layer_kv, AttentionBatch(starts, kv_lens, tables)


def lone_tokens(batch: AttentionBatch, every: int) -> Iterator[tuple[int, AttentionBatch]]:
    """Some tokens of a step, each as a decode of its own: (token, batch)."""
    starts = batch.q_starts.tolist()
    for line, (q_len, kv_len) in enumerate(SEQUENCES):
        for place in {*range(0, q_len, every), q_len - 1}:
            seen = torch.tensor([kv_len - q_len + place + 1], dtype=torch.int32)
            table = batch.block_tables[line : line + 1]
            yield (
                starts[line] + place,
                AttentionBatch(torch.tensor([0, 1], dtype=torch.int32), seen, table),
            )


def check_attention(
    kernels: Any,
    q: torch.Tensor,
    layer_kv: torch.Tensor,
    batch: AttentionBatch,
    heads: tuple[int, int, int],
    block_size: int,
    every: int = 7,
) -> None:
    """Near the plain twin, and bit by bit the same for each token alone."""
    scale = heads[2] ** -0.5
    plan = kernels.plan_attention(batch, *heads, block_size)
    out, lse = kernels.attention(q, layer_kv, plan, scale, True)
    twin = plain_attention.plan_attention(batch, *heads, block_size)
    near, near_lse = plain_attention.attention(q.cpu(), layer_kv.cpu(), twin, scale, True)
    tolerance = 1e-5 if q.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.cpu(), near, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), near_lse, atol=1e-2, rtol=1e-3)
    for token, lone in lone_tokens(batch, every):
        plan = kernels.plan_attention(lone, *heads, block_size)
        one, one_lse = kernels.attention(q[token : token + 1].clone(), layer_kv, plan, scale, True)
        assert torch.equal(one[0], out[token]), f"token {token}"
        assert torch.equal(one_lse[0], lse[token]), f"token {token}"
