"""Attention that reads a shared prefix once, on a card inside a CUDA graph, against float64."""

import random

import pytest
import torch

from zipage_lang.kernels import shared_prefix
from zipage_lang.kernels.attention import FlashInferAttention
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.graph_decode import GraphDecode
from zipage_lang.kernels.grouped_launch import GroupedLayout
from zipage_lang.kernels.shared_prefix import PrefixGroup, shared_blocks

pytestmark = pytest.mark.gpu
SCALE, POOL_BLOCKS = 0.09, 9000
CARD = torch.device("cuda:0")


def make_batch(rng, num_rows, block_size, *, per_group, shared_len, longest):
    """Groups of neighbours that begin with the same blocks; every fifth group shares nothing."""
    free = rng.sample(range(1, POOL_BLOCKS), POOL_BLOCKS - 1)
    kv_lens, rows = [], []
    while len(rows) < num_rows:
        prefix = [free.pop() for _ in range(shared_len // block_size)]
        for _ in range(rng.randrange(1, 2 * per_group)):
            kv_len = len(prefix) * block_size + rng.randrange(1, longest)
            own = -(-kv_len // block_size) - len(prefix)
            start = prefix if len(rows) % 5 else [free.pop() for _ in prefix]
            rows.append(start + [free.pop() for _ in range(own)])
            kv_lens.append(kv_len)
    tables = torch.full((num_rows, max(map(len, rows)) + 1), -1, dtype=torch.int32)
    for row in range(num_rows):
        tables[row, : len(rows[row])] = torch.tensor(rows[row])
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    return AttentionBatch(starts, torch.tensor(kv_lens[:num_rows], dtype=torch.int32), tables)


def exact(q, layer_kv, batch, heads):
    """float64 outputs and base-2 log-sum-exps, one row at a time."""
    outs, lses = [], []
    for row, kv_len in enumerate(batch.kv_lens.tolist()):
        width = -(-kv_len // heads.block_size)
        held = layer_kv[batch.block_tables[row, :width].long().to(CARD)].double()
        keys, values = (
            part.flatten(0, 1)[:kv_len].repeat_interleave(q.shape[1] // heads.num_kv_heads, 1)
            for part in held.unbind(1)
        )  # [kv_len, num_q_heads, head_dim] each
        scores = torch.einsum("hd,khd->hk", q[row].double(), keys) * SCALE
        outs.append(torch.einsum("hk,khd->hd", scores.softmax(1), values))
        lses.append(scores.logsumexp(1) / torch.log(torch.tensor(2.0, dtype=torch.float64)))
    return torch.stack(outs), torch.stack(lses)


def assert_right(found, wanted):
    for part, right, bound in zip(found, wanted, (8e-3, 1e-3), strict=True):
        error = (part.double() - right).norm() / right.norm()
        assert error < bound, error


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(32, 8, 128), (24, 8, 128), (8, 8, 64), (64, 8, 128)])
def test_one_capture_serves_other_groups_and_none(heads, block_size):
    rng, shape, bucket = random.Random(f"{heads} {block_size}"), Heads(*heads, block_size), 40
    kernels = FlashInferAttention(CARD, torch.bfloat16)
    graphs = GraphDecode(kernels, shape, max_rows=48, max_blocks=1200)
    pool = (POOL_BLOCKS, 2, block_size, shape.num_kv_heads, shape.head_dim)
    layer_kv = torch.empty(pool, device=CARD, dtype=torch.bfloat16).normal_()
    wide = torch.randn(bucket, shape.num_q_heads + 3, shape.head_dim, device=CARD).bfloat16()
    q = wide[:, : shape.num_q_heads]  # as the layers may pass it: a view into something wider

    plan = graphs.plan_padding(bucket, is_second=True)
    assert plan.is_second
    lse = torch.empty(q.shape[:2], device=CARD)
    kernels.attention(q, layer_kv, plan, SCALE, True, lse)  # compiles the merge
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = kernels.attention(q, layer_kv, plan, SCALE, True, lse)
    assert out.shape == q.shape

    longest = 100 if block_size == 1 else 500
    for num_rows, per_group, shared_len in ((40, 8, 128), (37, 2, 64), (40, 20, 64), (40, 1, 0)):
        batch = make_batch(
            rng, num_rows, block_size, per_group=per_group, shared_len=shared_len, longest=longest
        )
        groups = groups_of(batch, shape, GroupedLayout(bucket, shape).max_tiles)
        assert bool(groups) == (shared_len > 0)
        layer_kv.normal_()  # as if compacted and filled meanwhile
        out._base.fill_(torch.nan)  # shared parts included
        lse.fill_(torch.nan)
        again = graphs.plan_groups(batch, bucket, groups)
        assert again.parts[0].launch == plan.parts[0].launch
        graph.replay()
        found = out[:num_rows], lse[:num_rows]
        assert_right(found, exact(q[:num_rows], layer_kv, batch, shape))
        assert torch.isfinite(out).all(), "padding rows must not spread NaN"


def groups_of(batch, heads, max_tiles):
    """Whatever neighbours share, though it may not be worth it, as long as there is room."""
    tables, kv_lens = batch.block_tables.numpy(), batch.kv_lens.numpy()
    shared = shared_blocks(tables, kv_lens, heads.block_size).tolist()
    groups, first = [], 0
    for row, count in enumerate([*shared, 0]):
        if count == 0:
            group = PrefixGroup(first, row + 1, min(shared[first:row], default=0), 0)
            if row > first and group.num_tiles(heads) <= max_tiles:
                groups.append(group)
                max_tiles -= group.num_tiles(heads)
            first = row + 1
    return groups


def test_plans_group_where_it_pays_and_equal_the_plain_launch(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MERGE_BYTES", 16 * 2**20)
    rng, shape = random.Random(3), Heads(32, 8, 128, 16)
    kernels = FlashInferAttention(CARD, torch.bfloat16)
    graphs = GraphDecode(kernels, shape, max_rows=64, max_blocks=200)
    batch = make_batch(rng, 64, 16, per_group=8, shared_len=640, longest=300)
    layer_kv = torch.randn(POOL_BLOCKS, 2, 16, 8, 128, device=CARD).bfloat16()
    q = torch.randn(64, 32, 128, device=CARD).bfloat16()
    found = {}
    for may_be_second in (True, False):
        plan = graphs.plan(batch, 64, may_be_second=may_be_second)
        assert plan.is_second == may_be_second
        found[may_be_second] = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    wanted = exact(q, layer_kv, batch, shape)
    assert_right(found[True], wanted)
    assert_right(found[False], wanted)


def test_flashinfers_own_plan_names_what_we_write(monkeypatch):
    """An unsplit batch planned by FlashInfer itself: the same tile, no split, as many places."""
    monkeypatch.setattr(FlashInferAttention, "hopper_for", lambda *_: None)
    shape = Heads(32, 8, 128, 16)
    kernels = FlashInferAttention(CARD, torch.bfloat16)
    graphs = GraphDecode(kernels, shape, max_rows=64, max_blocks=200)
    batch = make_batch(random.Random(1), 64, 16, per_group=8, shared_len=640, longest=300)
    theirs = graphs.plan(batch, 64, may_be_second=False).parts[0].launch
    ours = graphs.plan_padding(64, is_second=True).parts[0].launch
    assert len(theirs.info) == len(ours.info)
    assert not theirs.is_causal
    num_rows, tile, merge, float_places, flags = 1, 3, 7, slice(10, 13), slice(13, 15)
    for place in (num_rows, tile, merge, float_places, flags):
        assert theirs.info[place] == ours.info[place], place
    assert theirs.info[0] == 64
