"""Plans of decodes and what they make of a grouped launch, up to the merge; on the CPU.

FlashInfer's kernel is played by a stand-in, the merge runs in Triton's interpreter.
"""

import types

import numpy as np
import pytest
import torch
from test_support.flashinfer_stand_in import stand_in_module

from zipage_lang.kernels import attention, graph_decode, plan_buffers, shared_prefix, whole_rows
from zipage_lang.kernels.attention import FlashInferAttention
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import Heads, Splits
from zipage_lang.kernels.graph_decode import GraphDecode
from zipage_lang.kernels.shared_prefix import PrefixGroup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a card")
HEADS, SCALE, POOL_BLOCKS, BUCKET = Heads(8, 2, 16, 4), 0.3, 400, 12


@pytest.fixture
def kernels(monkeypatch):
    """As on a card of one multiprocessor: two rows fill it."""

    def host_copy(num_bytes, num_entries):
        return plan_buffers.HostCopy(
            torch.zeros(num_bytes, dtype=torch.uint8),
            torch.full((num_entries,), -7, dtype=torch.int32),
            types.SimpleNamespace(synchronize=lambda: None, record=lambda: None),
        )

    monkeypatch.setattr(plan_buffers, "_host_copy", host_copy)
    monkeypatch.setattr(attention, "num_sms", lambda _: 1)
    monkeypatch.setattr(graph_decode, "num_sms", lambda _: 1)
    monkeypatch.setattr(shared_prefix, "MERGE_BYTES", 1000)
    monkeypatch.setattr(shared_prefix, "ITEM_BYTES", 16)
    kernels = FlashInferAttention(torch.device("cpu"), torch.bfloat16)
    kernels._modules[HEADS.head_dim] = stand_in_module()
    return kernels


@pytest.fixture
def graphs(kernels):
    return GraphDecode(kernels, HEADS, max_rows=BUCKET, max_blocks=9)


def make_batch(num_rows, shared_blocks, per_group=4):
    """Groups of neighbours that begin with the same blocks; lengths that differ."""
    tables = torch.arange(1, num_rows * 9 + 1, dtype=torch.int32).view(num_rows, 9)
    for first in range(0, num_rows, per_group):
        tables[first : first + per_group, :shared_blocks] = tables[first, :shared_blocks].clone()
    kv_lens = torch.arange(num_rows, dtype=torch.int32) % 7 + 4 * shared_blocks + 1
    return AttentionBatch(torch.arange(num_rows + 1, dtype=torch.int32), kv_lens, tables)


def random_tensors(seed):
    """float32 although on a card they never are: the stand-in takes any, and rounds less."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BUCKET, HEADS.num_q_heads, HEADS.head_dim, generator=generator)
    pool_shape = (POOL_BLOCKS, 2, HEADS.block_size, HEADS.num_kv_heads, HEADS.head_dim)
    return q, torch.randn(pool_shape, generator=generator)


def exact(q, layer_kv, batch):
    outs, lses = [], []
    for row, kv_len in enumerate(batch.kv_lens.tolist()):
        held = layer_kv[batch.block_tables[row].long()].double()
        keys, values = (
            part.flatten(0, 1)[:kv_len].repeat_interleave(4, 1) for part in held.unbind(1)
        )  # [kv_len, num_q_heads, head_dim] each
        scores = torch.einsum("hd,khd->hk", q[row].double(), keys) * SCALE
        outs.append(torch.einsum("hk,khd->hd", scores.softmax(1), values))
        lses.append(scores.logsumexp(1) / np.log(2))
    return torch.stack(outs).float(), torch.stack(lses).float()


def test_one_launch_serves_all_groupings(kernels, graphs):
    """What a graph holds: the first plan's launch and tensors, run after other plans."""
    captured = graphs.plan_padding(BUCKET, is_second=True)
    for num_rows, shared_blocks, per_group in ((12, 3, 4), (9, 7, 8), (12, 5, 2), (11, 4, 12)):
        batch = make_batch(num_rows, shared_blocks, per_group)
        plan = graphs.plan(batch, BUCKET)
        assert plan.is_second
        assert plan.parts[0].launch == captured.parts[0].launch
        q, layer_kv = random_tensors(num_rows)
        # Block ids lie behind everything of fixed place, as far as the step has any.
        index = captured.parts[0].index._replace(block_ids=plan.parts[0].index.block_ids)
        part = attention.AttentionPart(
            BUCKET, captured.parts[0].launch, index, captured.parts[0].workspace
        )
        held = attention.AttentionPlan((part,), captured.has_shared)
        out, lse = kernels.attention(q, layer_kv, held, SCALE, need_lse=True)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:2]
        wanted = exact(q, layer_kv, batch)
        torch.testing.assert_close(out[:num_rows], wanted[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:num_rows], wanted[1], rtol=1e-4, atol=1e-5)
        assert torch.isfinite(out).all()


def test_a_plan_may_name_no_group(kernels, graphs):
    batch, (q, layer_kv) = make_batch(BUCKET, 3), random_tensors(1)
    plan = graphs.plan_groups(batch, BUCKET, [])
    out, lse = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    wanted = exact(q, layer_kv, batch)
    torch.testing.assert_close(out, wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-4, atol=1e-5)


def test_shared_blocks_are_read_once_per_tile(kernels, graphs):
    batch, (q, layer_kv) = make_batch(BUCKET, 3), random_tensors(2)
    stand_in = kernels.module(HEADS.head_dim)._module
    own = int(((batch.kv_lens - 12 + 3) // 4).sum())
    for groups, shared in (
        ([], 3 * BUCKET),
        ([PrefixGroup(0, 4, 3, 0)], 3 + 3 * 8),  # 4 rows of 4 query heads: one tile
        ([PrefixGroup(4 * i, 4 * i + 4, 3, 0) for i in range(3)], 3 * 3),
    ):
        plan = graphs.plan_groups(batch, BUCKET, groups)
        kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
        assert stand_in.blocks_read == own + shared


def test_groups_are_found_anew_when_rows_change_and_not_before(graphs, monkeypatch):
    found = []

    def find(*arguments):
        found.append(shared_prefix.worthwhile_groups(*arguments))
        return found[-1]

    monkeypatch.setattr(graph_decode, "worthwhile_groups", find)
    batch = make_batch(12, 3)
    for kv_lens in (batch.kv_lens, batch.kv_lens + 1, batch.kv_lens + 2):
        assert graphs.plan(batch._replace(kv_lens=kv_lens), BUCKET).is_second
    assert [len(groups) for groups in found] == [3]
    graphs.plan(make_batch(11, 3), BUCKET)
    graphs.plan(make_batch(11, 5), BUCKET)
    assert [[group[:3] for group in groups][-1] for groups in found[1:]] == [(8, 11, 3), (8, 11, 5)]


class PlainPlan(Exception):
    """FlashInfer itself was asked to plan."""

    def __init__(self, splits):
        self.splits = splits


def refuse(_rows, _heads, _buffers, splits):
    raise PlainPlan(splits)


@pytest.mark.parametrize(
    ("shared_blocks", "bucket", "may_be_second"), [(0, 12, True), (3, 12, False), (3, 1, True)]
)
def test_nothing_shared_small_buckets_and_no_leave_take_the_plain_launch(
    kernels, graphs, monkeypatch, shared_blocks, bucket, may_be_second
):
    monkeypatch.setattr(kernels, "plan_part", refuse)
    with pytest.raises(PlainPlan):
        graphs.plan(make_batch(bucket, shared_blocks), bucket, may_be_second=may_be_second)


def test_only_launches_that_split_nothing_and_fit_rows_into_tiles_group(kernels, graphs):
    assert not graphs.can_group(graphs.min_unsplit_rows - 1)
    assert graphs.can_group(graphs.min_unsplit_rows)
    wide = GraphDecode(kernels, Heads(34, 2, 16, 4), max_rows=8, max_blocks=9)
    assert not wide.can_group(8)


def test_the_log_sum_exp_is_given_when_and_where_asked_only(kernels, graphs):
    plan, (q, layer_kv) = graphs.plan(make_batch(BUCKET, 3), BUCKET), random_tensors(3)
    out, lse = kernels.attention(q, layer_kv, plan, SCALE, need_lse=False)
    assert lse is None
    again, lse = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    assert torch.equal(out, again)
    layers = torch.full((3, *q.shape[:2]), torch.nan)
    again, given = kernels.attention(q, layer_kv, plan, SCALE, True, layers[1])
    assert torch.equal(out, again)
    assert given.data_ptr() == layers[1].data_ptr()
    assert torch.equal(layers[1], lse)
    assert layers[[0, 2]].isnan().all()


def test_nothing_shared_is_read_whole_by_flashinfers_own_plan(kernels, graphs, monkeypatch):
    monkeypatch.setattr(kernels, "plan_part", refuse)
    with pytest.raises(PlainPlan) as asked:
        graphs.plan(make_batch(BUCKET, 0), BUCKET)
    assert asked.value.splits is Splits.NEVER


@pytest.mark.parametrize(
    ("kv_lens", "may_be_second", "is_whole"),
    [
        ([30] * 8, True, True),
        ([30] * 7 + [4000], True, False),
        ([30] * 5, True, False),  # too few in a bucket of eight
        ([30] * 8, False, False),
    ],
)
def test_a_small_bucket_is_read_whole_where_rows_are_alike(
    kernels, monkeypatch, kv_lens, may_be_second, is_whole
):
    """The second launch splits nothing; the other is as large as any batch may need."""
    monkeypatch.setattr(graph_decode, "num_sms", lambda _: 10)
    monkeypatch.setattr(whole_rows, "SPLIT_BYTES", 200_000)
    graphs = GraphDecode(kernels, HEADS, max_rows=8, max_blocks=1000)
    assert graphs.has_second(8)
    assert not graphs.can_group(8)
    monkeypatch.setattr(kernels, "plan_part", refuse)
    batch = AttentionBatch(
        torch.arange(len(kv_lens) + 1, dtype=torch.int32),
        torch.tensor(kv_lens, dtype=torch.int32),
        torch.ones((len(kv_lens), 1000), dtype=torch.int32),
    )
    with pytest.raises(PlainPlan) as asked:
        graphs.plan(batch, 8, may_be_second=may_be_second)
    assert asked.value.splits is (Splits.NEVER if is_whole else Splits.ALWAYS)
    with pytest.raises(PlainPlan) as asked:
        graphs.plan_padding(8, is_second=True)
    assert asked.value.splits is Splits.NEVER
