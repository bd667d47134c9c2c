"""Paged attention against a loop in float64 over requests, tokens and heads.

Knows nothing of models.
"""

import math

import pytest
import torch

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.reference.attention import attention, plan_attention

SCALE = 0.3


def make_case(
    seed, q_lens, kv_lens, *, heads=(3, 1), head_dim=8, block_size=4, dtype=torch.float32, share=0
):
    """Queries, a pool full of NaN but for the resident slots, and the batch's metadata.

    The first `share` slots of all sequences lie in the same blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
    shared_blocks = share // block_size
    pool_size = 2 + sum(num_blocks)
    free = (torch.randperm(pool_size - 1, generator=generator) + 1).tolist()
    shared = [free.pop() for _ in range(shared_blocks)]
    tables = torch.full((len(q_lens), max(num_blocks) + 1), -1, dtype=torch.int32)
    layer_kv = torch.full((pool_size, 2, block_size, heads[1], head_dim), math.nan, dtype=dtype)
    for row, count in enumerate(num_blocks):
        own = shared + [free.pop() for _ in range(count - shared_blocks)]
        tables[row, :count] = torch.tensor(own, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens):
        for slot in range(kv_len):
            block, offset = int(tables[row, slot // block_size]), slot % block_size
            values = torch.randn(2, heads[1], head_dim, generator=generator).to(dtype)
            layer_kv[block, :, offset] = values
    q = torch.randn(sum(q_lens), heads[0], head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return q, layer_kv, AttentionBatch(starts, torch.tensor(kv_lens, dtype=torch.int32), tables)


def run(q, layer_kv, batch):
    num_kv_heads, head_dim, block_size = layer_kv.shape[3], layer_kv.shape[4], layer_kv.shape[2]
    plan = plan_attention(batch, q.shape[1], num_kv_heads, head_dim, block_size)
    return attention(q, layer_kv, plan, SCALE, need_lse=True)


def slow_attention(q, layer_kv, batch):
    """One softmax at a time, slot by slot, in float64."""
    block_size, group = layer_kv.shape[2], q.shape[1] // layer_kv.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    for row, kv_len in enumerate(batch.kv_lens.tolist()):
        start, stop = batch.q_starts[row : row + 2].tolist()
        for token in range(start, stop):
            seen = kv_len - (stop - 1 - token)
            slots = [
                layer_kv[int(batch.block_tables[row, slot // block_size]), :, slot % block_size]
                for slot in range(seen)
            ]
            k_and_v = torch.stack(slots).double()  # [seen, 2, num_kv_heads, head_dim]
            for head in range(q.shape[1]):
                k, v = k_and_v[:, 0, head // group], k_and_v[:, 1, head // group]
                weights = (k @ q[token, head].double() * SCALE).exp()
                out[token, head] = weights @ v / weights.sum()
                lse[token, head] = weights.sum().log2()
    return out, lse


def assert_right(case, tolerance=1e-5):
    out, lse = run(*case)
    expected_out, expected_lse = slow_attention(*case)
    torch.testing.assert_close(out.double(), expected_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)
    assert out.dtype == case[0].dtype
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (8, 1)])
def test_mixed_batch_equals_the_loop(block_size, heads):
    q_lens, kv_lens = [1, 5, 1, 17, 2, 1], [33, 5, 1, 40, 19, 64]
    assert_right(make_case(0, q_lens, kv_lens, heads=heads, block_size=block_size))


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_equal_the_loop(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, count=1):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    num_seqs = draw(1, 7)[0]
    q_lens = [length if length > 4 else 1 for length in draw(1, 9, num_seqs)]
    kv_lens = [q_len + extra for q_len, extra in zip(q_lens, draw(0, 30, num_seqs), strict=True)]
    num_kv_heads, group, block_size = draw(1, 4)[0], draw(1, 5)[0], draw(1, 9)[0]
    head_dim = 2 * draw(1, 12)[0]
    heads = (num_kv_heads * group, num_kv_heads)
    case = make_case(seed, q_lens, kv_lens, heads=heads, head_dim=head_dim, block_size=block_size)
    assert_right(case)


def test_decodes_of_very_different_lengths_are_split_and_equal_the_loop():
    kv_lens = [900, 3, 7, 20, 850, 1, 12]
    case = make_case(1, [1] * 7, kv_lens, heads=(2, 1), head_dim=4)
    plan = plan_attention(case[2], 2, 1, 4, 4)
    assert len(plan.groups) == 2
    assert_right(case)


def test_decodes_of_equal_length_run_as_one_group_without_a_mask():
    q, layer_kv, batch = make_case(2, [1] * 5, [8] * 5)
    plan = plan_attention(batch, 3, 1, 8, 4)
    assert [(group.num_seqs, group.mask) for group in plan.groups] == [(5, None)]
    assert_right((q, layer_kv, batch))


def test_sequences_may_share_blocks():
    assert_right(make_case(3, [1, 3, 1], [12, 15, 9], share=8))


def test_bfloat16_is_close_to_the_loop():
    case = make_case(4, [1, 4, 1], [30, 9, 50], heads=(6, 2), dtype=torch.bfloat16)
    assert_right(case, tolerance=2e-2)


def test_log_sum_exps_go_where_they_are_asked_to():
    q, layer_kv, batch = make_case(5, [2, 1], [4, 6])
    plan = plan_attention(batch, 3, 1, 8, 4)
    layers = torch.full((3, *q.shape[:2]), math.nan)
    _, lse = attention(q, layer_kv, plan, SCALE, True, layers[1])
    assert lse.data_ptr() == layers[1].data_ptr()
    assert torch.equal(layers[1], run(q, layer_kv, batch)[1])
    assert layers[[0, 2]].isnan().all()


def test_no_lse_is_returned_unless_asked_for():
    q, layer_kv, batch = make_case(5, [2, 1], [4, 6])
    plan = plan_attention(batch, 3, 1, 8, 4)
    out, lse = attention(q, layer_kv, plan, SCALE, need_lse=False)
    assert lse is None
    assert torch.equal(out, run(q, layer_kv, batch)[0])


def test_a_sequence_longer_in_queries_than_in_slots_is_refused():
    _, _, batch = make_case(6, [2], [4])
    with pytest.raises(AssertionError, match="kv_lens"):
        plan_attention(batch._replace(kv_lens=torch.tensor([1])), 3, 1, 8, 4)
