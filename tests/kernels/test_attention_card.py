"""Attention on a card, FlashInfer's two kernels and our own of decodes, eager and in CUDA graphs,
against float64."""

import random

import pytest
import torch

from zipage_lang.kernels import attention, flashinfer_module, fused_ops
from zipage_lang.kernels.attention import FlashInferAttention
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.graph_decode import GraphDecode
from zipage_lang.kernels.hopper.attention import DecodePart
from zipage_lang.kernels.hopper.linear import HopperLinear
from zipage_lang.kernels.prompt_attention import PromptPart

pytestmark = pytest.mark.gpu
SCALE = 0.09
CARD = "cuda:0"


@pytest.fixture
def flashinfer_alone(monkeypatch):
    """Decodes by FlashInfer, as where our kernel is not made for the shape."""
    monkeypatch.setattr(FlashInferAttention, "hopper_for", lambda *_: None)


def make_batch(rng, q_lens, kv_lens, block_size, pool_blocks):
    """Every sequence in blocks of its own, in random order, none of them block 0."""
    widths = [-(-kv_len // block_size) for kv_len in kv_lens]
    free = rng.sample(range(1, pool_blocks), sum(widths))
    tables = torch.full((len(q_lens), max(widths) + 1), -1, dtype=torch.int32)
    for row, width in enumerate(widths):
        tables[row, :width] = torch.tensor([free.pop() for _ in range(width)])
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    return AttentionBatch(starts, torch.tensor(kv_lens, dtype=torch.int32), tables)


def make_tensors(heads, pool_blocks, num_tokens, dtype=torch.bfloat16):
    """Queries as a view into a wider tensor, and a pool; both random."""
    pool_shape = (pool_blocks, 2, heads.block_size, heads.num_kv_heads, heads.head_dim)
    layer_kv = torch.randn(pool_shape, device=CARD).to(dtype)
    wide = torch.randn(num_tokens, heads.num_q_heads + 3, heads.head_dim, device=CARD).to(dtype)
    return wide[:, : heads.num_q_heads], layer_kv


def exact(q, layer_kv, batch, heads):
    """float64 outputs and base-2 log-sum-exps, one sequence at a time."""
    outs, lses = [], []
    for row, kv_len in enumerate(batch.kv_lens.tolist()):
        mine = q[int(batch.q_starts[row]) : int(batch.q_starts[row + 1])].double()
        width = -(-kv_len // heads.block_size)
        held = layer_kv[batch.block_tables[row, :width].long().to(CARD)].double()
        keys, values = held.unbind(1)  # [width, block_size, num_kv_heads, head_dim] each
        group = heads.num_q_heads // heads.num_kv_heads
        keys, values = (
            part.flatten(0, 1)[:kv_len].repeat_interleave(group, 1) for part in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", mine, keys) * SCALE
        last = torch.arange(len(mine), device=CARD) + kv_len - len(mine)
        scores.masked_fill_(torch.arange(kv_len, device=CARD) > last[:, None], -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        lses.append(scores.logsumexp(-1).T / torch.log(torch.tensor(2.0, dtype=torch.float64)))
    return torch.cat(outs), torch.cat(lses)


def assert_right(found, wanted):
    for part, right, bound in zip(found, wanted, (6e-3, 1e-3), strict=True):
        error = (part.double() - right).norm() / right.norm()
        assert error < bound, error


LOADS = {
    "decodes": [1] * 70,
    "few": [1] * 3,
    "mixed": [1] * 9 + [130, 1, 7],
    "chunk": [411],
}


def check_eager(q_lens, shape, dtype):
    rng = random.Random(f"{shape} {q_lens}")
    kv_lens = [q_len + rng.randrange(1500) for q_len in q_lens]
    pool_blocks = 2 + sum(-(-kv_len // shape.block_size) for kv_len in kv_lens)
    batch = make_batch(rng, q_lens, kv_lens, shape.block_size, pool_blocks)
    q, layer_kv = make_tensors(shape, pool_blocks, sum(q_lens), dtype)
    kernels = FlashInferAttention(torch.device(CARD), dtype)
    plan = kernels.plan_attention(batch, *shape)
    found = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    assert found[0].dtype == dtype
    assert_right(found, exact(q, layer_kv, batch, shape))
    out, lse = kernels.attention(q, layer_kv, plan, SCALE, need_lse=False)
    assert lse is None
    assert torch.equal(out, found[0])
    layers = torch.full((3, *q.shape[:2]), torch.nan, device=CARD)
    kernels.attention(q, layer_kv, plan, SCALE, True, layers[1])
    assert torch.equal(layers[1], found[1])
    assert layers[[0, 2]].isnan().all()
    return plan


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(32, 8, 128), (40, 8, 128), (64, 8, 128), (4, 2, 64)])
@pytest.mark.parametrize("load", LOADS)
def test_attention_equals_float64(block_size, heads, load):
    check_eager(LOADS[load], Heads(*heads, block_size), torch.bfloat16)


@pytest.mark.parametrize("load", LOADS)
def test_flashinfer_attention_equals_float64(load, flashinfer_alone):
    check_eager(LOADS[load], Heads(32, 8, 128, 16), torch.bfloat16)


PROMPTS = {
    "mixed": [130, 1, 7],
    "chunk": [411],
    "many": [2, 128, 64, 129, 1, 1, 383, 512, 33],
    "behind decodes": [1] * 9 + [300, 40],
}


@pytest.fixture
def prompts_by_hopper(monkeypatch):
    """Whatever the rule says."""
    monkeypatch.setattr(attention, "is_for_hopper", lambda *_: True)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(32, 8, 128), (40, 8, 128), (14, 2, 64), (4, 4, 64)])
@pytest.mark.parametrize("load", PROMPTS)
def test_prompts_by_the_kernel_for_hopper_equal_float64(block_size, heads, load, prompts_by_hopper):
    plan = check_eager(PROMPTS[load], Heads(*heads, block_size), torch.bfloat16)
    assert isinstance(plan.parts[-1], PromptPart)


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 2, 64)])
def test_the_kernel_for_hopper_reads_its_sequences_slots_alone(heads, prompts_by_hopper):
    rng, shape, q_lens = random.Random(3), Heads(*heads, 16), [50, 129, 2, 400]
    kv_lens = [q_len + rng.choice([0, 1, 15, 700]) for q_len in q_lens]
    batch = make_batch(rng, q_lens, kv_lens, 16, 200)
    q, layer_kv = make_tensors(shape, 200, sum(q_lens))
    kept = torch.zeros(200, 16, dtype=torch.bool, device=CARD)
    for row, kv_len in enumerate(kv_lens):
        slots = torch.arange(kv_len, device=CARD)
        kept[batch.block_tables[row].to(CARD)[slots // 16].long(), slots % 16] = True
    layer_kv.masked_fill_(~kept[:, None, :, None, None], torch.nan)
    kernels = FlashInferAttention(torch.device(CARD), torch.bfloat16)
    plan = kernels.plan_attention(batch, *shape)
    assert isinstance(plan.parts[0], PromptPart)
    found = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    assert_right(found, exact(q, layer_kv, batch, shape))


@pytest.mark.parametrize("seed", range(6))
def test_any_prompts_equal_float64_by_whichever_kernel_is_chosen(seed, request):
    rng = random.Random(f"{seed} {request.config.getoption('--fresh-seed')}")
    q_lens = [rng.randrange(1, 700) for _ in range(rng.randrange(1, 9))]
    check_eager([1] * rng.randrange(3) + q_lens, Heads(32, 8, 128, 16), torch.bfloat16)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 17, 31, 34, 50, 67, 100, 129, 192, 250])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (14, 2, 64), (8, 8, 64)])
def test_our_decodes_equal_float64_whatever_is_cut(num_rows, heads):
    rng, shape = random.Random(num_rows), Heads(*heads, 16)
    lens = [rng.choice([1, 16, 63, 300, 1390, 4000]) for _ in range(num_rows)]
    pool_blocks = 2 + sum(-(-kv_len // 16) for kv_len in lens)
    batch = make_batch(rng, [1] * num_rows, lens, 16, pool_blocks)
    q, layer_kv = make_tensors(shape, pool_blocks, num_rows)
    kernels = FlashInferAttention(torch.device(CARD), torch.bfloat16)
    plan = kernels.plan_attention(batch, *shape)
    assert isinstance(plan.parts[0], DecodePart)
    first = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    assert_right(first, exact(q, layer_kv, batch, shape))
    for _ in range(20):
        again = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_float16_attention_equals_float64():
    """FlashInfer builds this module where no one has built it before: half a minute, once."""
    for q_lens in LOADS.values():
        check_eager(q_lens, Heads(8, 2, 64, 16), torch.float16)


def check_capture(graphs, kernels, shape, bucket, batches, *, is_second):
    """One capture of a bucket's launch, replayed for other steps, against float64."""
    pool_blocks = 20_000
    q, layer_kv = make_tensors(shape, pool_blocks, bucket)
    plan = graphs.plan_padding(bucket, is_second=is_second)
    kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernels.attention(q, layer_kv, plan, SCALE, need_lse=True)
    for batch in batches:
        num_rows = len(batch.kv_lens)
        out.fill_(torch.nan)
        assert graphs.plan(batch, bucket, may_be_second=is_second).is_second == is_second
        graph.replay()
        found = out[:num_rows], lse[:num_rows]
        assert_right(found, exact(q[:num_rows], layer_kv, batch, shape))
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("bucket", [1, 8, 33, 34, 96])
def test_one_capture_serves_other_lengths_and_fewer_rows(bucket):
    check_other_lengths(bucket)


@pytest.mark.parametrize("bucket", [1, 8, 33, 34, 96])
def test_one_capture_of_flashinfer_serves_other_lengths(bucket, flashinfer_alone):
    check_other_lengths(bucket)


def check_other_lengths(bucket):
    rng, shape = random.Random(bucket), Heads(32, 8, 128, 16)
    kernels = FlashInferAttention(torch.device(CARD), torch.bfloat16)
    graphs = GraphDecode(kernels, shape, max_rows=96, max_blocks=200)

    def batch_of(num_rows, longest):
        kv_lens = [rng.randrange(1, longest) for _ in range(num_rows)]
        return make_batch(rng, [1] * num_rows, kv_lens, 16, 20_000)

    cases = ((bucket, 3000), (max(1, bucket // 2), 40), (bucket, 3000))
    batches = [batch_of(*case) for case in cases]
    check_capture(graphs, kernels, shape, bucket, batches, is_second=False)


@pytest.mark.parametrize(("bucket", "row_counts"), [(24, (20, 24)), (32, (32, 27))])
def test_one_capture_serves_small_batches_read_whole(bucket, row_counts, flashinfer_alone):
    rng, shape = random.Random(bucket), Heads(32, 8, 128, 16)
    kernels = FlashInferAttention(torch.device(CARD), torch.bfloat16)
    graphs = GraphDecode(kernels, shape, max_rows=32, max_blocks=200)
    batches = []
    for num_rows in row_counts:
        kv_lens = [rng.randrange(1200, 1500) for _ in range(num_rows)]
        batches.append(make_batch(rng, [1] * num_rows, kv_lens, 16, 20_000))
    check_capture(graphs, kernels, shape, bucket, batches, is_second=True)


def many_layers(kernels, num_rows, seed):
    """Attention, the product behind it, attention on what that made, six times; and its input."""
    rng, shape, pool_blocks = random.Random(seed), Heads(32, 8, 128, 16), 20_000
    kv_lens = [rng.randrange(900, 1100) for _ in range(num_rows)]
    batch = make_batch(rng, [1] * num_rows, kv_lens, 16, pool_blocks)
    first_q, layer_kv = make_tensors(shape, pool_blocks, num_rows)
    product = HopperLinear(torch.randn(4096, 4096, device=CARD).bfloat16() / 64, None, gated=False)
    graphs = GraphDecode(kernels, shape, max_rows=num_rows, max_blocks=100)
    plan, q = graphs.plan(batch, num_rows), first_q.contiguous()

    def work(between=lambda: None):
        made = q
        for _ in range(6):
            out, _ = kernels.attention(made, layer_kv, plan, SCALE, need_lse=False)
            between()
            made = product(out.flatten(1)).view(q.shape)
            between()
        return made

    return work, q


def replayed(work, q, inputs):
    """What a graph of `work` makes of each input."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    found = []
    for value in inputs:
        q.copy_(value)
        graph.replay()
        found.append(made.clone())
    return torch.stack(found)


@pytest.mark.parametrize("num_rows", [24, 64, 128, 192])
def test_what_follows_an_early_release_reads_what_attention_wrote(
    num_rows, monkeypatch, flashinfer_alone
):
    """The same bits in a graph as where each kernel begins when the one before it has ended."""
    kernels = FlashInferAttention(torch.device(CARD), torch.bfloat16)
    work, q = many_layers(kernels, num_rows, num_rows)
    inputs = [q.roll(turn, 0).clone() for turn in range(20)]
    results = []
    for pairs in (range(0), range(10**6)):
        monkeypatch.setattr(flashinfer_module, "RELEASING_PAIRS", pairs)
        results.append(replayed(work, q, inputs))
    assert torch.equal(*results)
    assert len(results[0].float().flatten(1).unique(dim=0)) == min(20, num_rows)


@pytest.mark.parametrize("num_rows", [1, 5, 24, 64, 100, 192])
def test_our_decodes_in_a_graph_equal_those_with_waits_between_kernels(num_rows):
    kernels = FlashInferAttention(torch.device(CARD), torch.bfloat16)
    work, q = many_layers(kernels, num_rows, num_rows)
    inputs = [q.roll(turn, 0).clone() for turn in range(20)]
    found = replayed(work, q, inputs)
    for value, made in zip(inputs, found, strict=True):
        q.copy_(value)
        assert torch.equal(work(torch.cuda.synchronize), made)


@pytest.mark.parametrize("num_rows", [1, 6, 40, 130])
def test_our_decodes_read_the_slot_that_the_kernel_ahead_has_just_written(num_rows):
    """As in a layer: K and V stored, attention, a product; new lengths at each end of a tile."""
    rng, shape, pool_blocks = random.Random(num_rows), Heads(32, 8, 128, 16), 12_000
    kv_lens = [64 * rng.randrange(1, 20) + rng.choice([-1, 0, 1, 2]) for _ in range(num_rows)]
    batch = make_batch(rng, [1] * num_rows, kv_lens, 16, pool_blocks)
    _, layer_kv = make_tensors(shape, pool_blocks, 1)
    kernels = FlashInferAttention(torch.device(CARD), torch.bfloat16)
    plan = GraphDecode(kernels, shape, max_rows=num_rows, max_blocks=90).plan(batch, num_rows)
    last = torch.tensor([(kv_len - 1) // 16 for kv_len in kv_lens])
    blocks = batch.block_tables.gather(1, last[:, None])[:, 0].long()
    slots = (blocks * 16 + torch.tensor([(kv_len - 1) % 16 for kv_len in kv_lens])).to(CARD)
    angles = torch.rand(num_rows, 64, device=CARD)
    norm = torch.ones(128, device=CARD).bfloat16()
    merged, out_proj = (
        HopperLinear(torch.randn(*size, device=CARD).bfloat16() / 64, None, gated=False)
        for size in ((6144, 4096), (4096, 4096))
    )
    x = torch.randn(num_rows, 4096, device=CARD).bfloat16()

    def work(between=lambda: None):
        made = x
        for _ in range(4):
            qkv = merged(made)
            between()
            rotation = angles.cos(), angles.sin()
            q = fused_ops.qk_norm_rope_store(qkv, norm, norm, 1e-6, *rotation, layer_kv, slots)
            between()
            out, _ = kernels.attention(q, layer_kv, plan, SCALE, need_lse=False)
            between()
            made = out_proj(out.flatten(1))
            between()
        return made

    inputs = [torch.randn_like(x) for _ in range(20)]
    found = replayed(work, x, inputs)
    for value, made in zip(inputs, found, strict=True):
        x.copy_(value)
        assert torch.equal(work(torch.cuda.synchronize), made)
