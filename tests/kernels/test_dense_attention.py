"""The card's float32 attention against the CPU twin; it is plain torch, so it runs on both."""

import random

import pytest
import torch

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.dense_attention import DenseAttention
from zipage_lang.kernels.reference import attention as reference


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_dense_attention_equals_the_twin(device, heads):
    rng, block_size, head_dim = random.Random(heads[0]), 4, 24
    q_lens = [1, 1, 9, 3, 1]
    kv_lens = [q_len + rng.randrange(40) for q_len in q_lens]
    widths = [-(-kv_len // block_size) for kv_len in kv_lens]
    blocks = (torch.randperm(sum(widths)) + 1).int().split(widths)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True, padding_value=-1)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    batch = AttentionBatch(starts, torch.tensor(kv_lens, dtype=torch.int32), tables)
    layer_kv = torch.randn(1 + sum(widths), 2, block_size, heads[1], head_dim)
    q = torch.randn(sum(q_lens), heads[0], head_dim)
    shape = (*heads, head_dim, block_size)

    kernels = DenseAttention(device)
    found_plan = kernels.plan_attention(batch, *shape)
    lse_out = torch.full(q.shape[:2], torch.nan, device=device)
    found = kernels.attention(q.to(device), layer_kv.to(device), found_plan, 0.2, True, lse_out)
    assert found[1].data_ptr() == lse_out.data_ptr()

    plan = reference.plan_attention(batch, *shape)
    wanted = reference.attention(q, layer_kv, plan, 0.2, need_lse=True)
    for part, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(part.cpu(), right, atol=1e-5, rtol=1e-5)
