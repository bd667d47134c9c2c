"""The decode products against float64, in every cut that a config can name."""

import pytest
import torch
from test_support.tensors import random_tensor

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import fused_ops
from zipage_lang.kernels.skinny import (
    GATE_GROUP,
    MAX_ROWS,
    MAX_TILE,
    NUM_SMS,
    SHARED_BYTES,
    SkinnyConfig,
    SkinnyLinear,
    choose_config,
    padded_rows,
    sum_partials,
)


def make(num_rows, out_size, in_size, device, dtype=torch.float16, bias=False):
    x = random_tensor(num_rows, in_size, dtype=dtype, device=device)
    weight = random_tensor(out_size, in_size, dtype=dtype, device=device, seed=1)
    added = random_tensor(out_size, dtype=dtype, device=device, seed=2) * 8 if bias else None
    return x, weight, added


def product64(x, weight, bias):
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def gate64(out):
    gate, up = out.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def assert_near(got, exact):
    tolerance = 2e-3 if got.dtype == torch.float16 else 1.6e-2  # the interpreter truncates
    scale = exact.abs().max().item()
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance * scale)


CUTS = [
    SkinnyConfig(64, 0, 64, 1, 3, 4),
    SkinnyConfig(64, 0, 64, 2, 3, 4, tma=False),
    SkinnyConfig(128, 64, 32, 3, 3, 8),
    SkinnyConfig(128, 0, 64, 4, 2, 8),
    SkinnyConfig(64, 0, 64, 2, 3, 4, partial_dtype=torch.float16),
]


@pytest.mark.parametrize("num_rows", [1, 3, 17, 100])
@pytest.mark.parametrize("config", CUTS)
def test_every_cut_gives_the_product(device, num_rows, config):
    # neither size is a whole number of tiles
    x, weight, bias = make(num_rows, 212, 264, device, bias=True)
    linear = SkinnyLinear.prepare(weight, bias)
    partials = linear.run(x, config)
    assert partials.shape == (config.num_splits, num_rows, 212)
    assert partials.dtype == (config.partial_dtype if config.num_splits > 1 else x.dtype)
    assert_near(sum_partials(partials, x.dtype), product64(x, weight, bias))


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize(("num_rows", "tail_n", "bias"), [(3, 64, True), (17, 0, False)])
def test_gated_product_is_silu_of_gate_times_up(device, num_rows, tail_n, bias, tma):
    x, weight, bias = make(num_rows, 2 * 136, 264, device, bias=bias)
    linear = SkinnyLinear.prepare(weight, bias, gated=True)
    out = linear.run(x, SkinnyConfig(128, tail_n, 64, 1, 3, 8, tma=tma))
    assert_near(out[0], gate64(product64(x, weight, bias)))


def test_bfloat16_products_round_once(device):
    x, weight, _ = make(5, 128, 128, device, dtype=torch.bfloat16)
    out = SkinnyLinear.prepare(weight, None)(x)
    assert out.dtype == torch.bfloat16
    assert_near(out, product64(x, weight, None))


def test_interleaved_gate_serves_other_products_too(device):
    x, weight, _ = make(5, 64, 64, device)
    linear = SkinnyLinear.prepare(weight, None, gated=True)
    gate_up = torch.nn.functional.linear(x.float(), linear.weight.float())
    out = fused_ops.silu_mul_interleaved(gate_up, GATE_GROUP)
    exact = gate64(product64(x, weight, None))
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


def test_no_rows_give_no_rows(device):
    x, weight, _ = make(0, 64, 64, device)
    assert SkinnyLinear.prepare(weight, None)(x).shape == (0, 64)


def test_add_rms_norm_sums_partials_in_float32(device):
    partials = random_tensor(3, 5, 72, dtype=torch.float32, device=device)
    residual = random_tensor(5, 72, dtype=torch.float16, device=device, seed=1)
    weight = random_tensor(72, dtype=torch.float16, device=device, seed=2)
    normed, total = fused_ops.add_rms_norm_partials(partials, residual, weight, 1e-5)
    exact = partials.double().sum(0) + residual.double()
    assert_near(total, exact)
    scale = (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_near(normed, exact / scale * weight.double())


def test_qk_norm_rope_store_sums_partials_before_it_rounds(device):
    num_q_heads, num_kv_heads, head_dim = 3, 2, 16
    size = (num_q_heads + 2 * num_kv_heads) * head_dim
    partials = random_tensor(4, 5, size, dtype=torch.float32, device=device)
    weight = random_tensor(head_dim, dtype=torch.float16, device=device, seed=1)
    angle = random_tensor(5, head_dim // 2, dtype=torch.float32, device=device, seed=2)
    angles = angle.cos(), angle.sin()
    slots = torch.tensor([3, -1, 0, 7, 5], device=device)
    pools = [torch.zeros(2, 2, 4, 2, 16, dtype=torch.float16, device=device) for _ in range(2)]
    of_sum = partials.double().sum(0).half()
    want = fused_ops.qk_norm_rope_store(of_sum, weight, weight, 1e-6, *angles, pools[0], slots)
    got = fused_ops.qk_norm_rope_store_partials(
        partials, weight, weight, 1e-6, *angles, pools[1], slots
    )
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(pools[1], pools[0], rtol=2e-3, atol=2e-3)
    assert pools[1].any()


@pytest.mark.parametrize("num_rows", [1, 16, 33, 128, MAX_ROWS])
@pytest.mark.parametrize("shape", [(6144, 4096), (24576, 4096), (4096, 12288), (576, 1536)])
def test_chosen_cuts_fit_an_sm(num_rows, shape):
    for gated in (False, True):
        config = choose_config(num_rows, *shape, gated)
        tile, rows = config.block_n + config.tail_n, padded_rows(num_rows)
        assert tile * rows <= MAX_TILE
        assert config.num_stages * (tile + rows) * config.block_k * 2 <= SHARED_BYTES
        assert config.num_splits == 1 or not gated
        if not gated and shape[0] >= 4096:
            num_programs = -(-shape[0] // tile) * config.num_splits
            assert num_programs >= 0.9 * NUM_SMS


@pytest.mark.gpu
def test_product_waits_for_the_kernel_that_writes_its_rows_in_a_cuda_graph():
    device = torch.device("cuda")
    x, weight, _ = make(100, 4096, 4096, device, dtype=torch.bfloat16)
    linear = SkinnyLinear.prepare(weight, None)
    scale = torch.ones(4096, dtype=torch.bfloat16, device=device)

    def chain():
        return linear(fused_ops.rms_norm(x, scale, 1e-6))

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in (5, 6, 7):
        x.copy_(random_tensor(100, 4096, dtype=torch.bfloat16, device=device, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        normed = fused_ops.rms_norm(x, scale, 1e-6)
        assert_near(out, product64(normed, weight, None))
