"""The fused Triton kernels against their twins: float32 to rounding, bfloat16 to three of them."""

import pytest
import torch
from test_support.tensors import random_tensor

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import fused_ops, kv_store
from zipage_lang.kernels.reference import fused_ops as reference

DTYPES = [torch.float32, torch.bfloat16]
# num_q_heads, num_kv_heads, head_dim
SHAPES = [(4, 4, 16), (9, 3, 64), (16, 1, 128), (12, 10, 80)]


def assert_near(got, want, exact, terms=None):
    """`want` is the twin's; `exact` the float64 value, which must be as near as rounding allows.

    terms: the size of what was rounded and then added up, where that may cancel; else the value's.
    """
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    half_precision = 1.2e-2 if got.is_cuda else 2.5e-2  # the interpreter truncates
    tolerance = 3e-6 if got.dtype == torch.float32 else half_precision
    allowed = tolerance * (1 + (exact.abs() if terms is None else terms))
    for other, factor in ((exact, 1), (want.double(), 2)):
        excess = ((got.double() - other).abs() - factor * allowed).max() if got.numel() else 0
        assert excess <= 0, f"{excess} beyond what rounding does"


def doubled(*tensors):
    return [tensor.double() for tensor in tensors]


def norm64(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_tokens"), [(64, 0), (8, 5), (1000, 3), (4096, 2), (8192, 1)])
def test_rms_norm_equals_its_twin(device, dtype, size, num_tokens):
    x = random_tensor(num_tokens, size, dtype=dtype, device=device) * 3
    weight = random_tensor(size, dtype=dtype, device=device, seed=1)
    got, want = fused_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    assert_near(got, want, norm64(*doubled(x, weight), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:2])
def test_rms_norm_reads_strided_heads(device, dtype, shape):
    num_q_heads, num_kv_heads, head_dim = shape
    merged = random_tensor(7, num_q_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    heads = merged[:, num_q_heads : num_q_heads + num_kv_heads]
    weight = random_tensor(head_dim, dtype=dtype, device=device, seed=1)
    got, want = fused_ops.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6)
    assert_near(got, want, norm64(*doubled(heads, weight), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1000, 4096])
def test_add_rms_norm_equals_its_twin_and_leaves_its_inputs(device, dtype, size):
    x = random_tensor(5, size, dtype=dtype, device=device)
    residual = random_tensor(5, size, dtype=dtype, device=device, seed=1) * 2
    weight = random_tensor(size, dtype=dtype, device=device, seed=2)
    before = x.clone(), residual.clone()
    normed, total = fused_ops.add_rms_norm(x, residual, weight, 1e-5)
    want_normed, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    if device.type == "cuda" or dtype == torch.float32:  # the interpreter truncates to bfloat16
        assert torch.equal(total, want_total)
    assert_near(total, want_total, x.double() + residual.double())
    assert_near(normed, want_normed, norm64(*doubled(total, weight), 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_without_a_weight_equal_those_by_ones(device, dtype):
    x = random_tensor(5, 1000, dtype=dtype, device=device) * 3
    residual = random_tensor(5, 1000, dtype=dtype, device=device, seed=1)
    ones = torch.ones(1000, dtype=dtype, device=device)
    assert torch.equal(fused_ops.rms_norm(x, None, 1e-5), fused_ops.rms_norm(x, ones, 1e-5))
    assert torch.equal(reference.rms_norm(x, None, 1e-5), reference.rms_norm(x, ones, 1e-5))
    for module in (fused_ops, reference):
        bare = module.add_rms_norm(x, residual, None, 1e-5)
        for one, other in zip(bare, module.add_rms_norm(x, residual, ones, 1e-5), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_tokens"), [(64, 0), (3, 6), (1024, 1), (2500, 3)])
def test_silu_mul_equals_its_twin(device, dtype, size, num_tokens):
    gate_up = random_tensor(num_tokens, 2 * size, dtype=dtype, device=device) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    assert_near(fused_ops.silu_mul(gate_up), reference.silu_mul(gate_up), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "group"), [(8, 8), (1024, 8), (1536, 8), (96, 32)])
def test_silu_mul_of_interleaved_columns_is_that_of_halves(device, dtype, size, group):
    gate_up = random_tensor(3, 2 * size, dtype=dtype, device=device) * 4
    in_turn = gate_up.view(3, 2, -1, group).transpose(1, 2).reshape(3, -1)
    found = fused_ops.silu_mul_interleaved(in_turn, group)
    assert torch.equal(found, fused_ops.silu_mul(gate_up))
    assert not torch.equal(found, fused_ops.silu_mul(in_turn)) or size == group == 8


def test_silu_mul_of_huge_gates_is_finite_or_zero(device):
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 0.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    assert fused_ops.silu_mul(gate_up).tolist() == [[0.0, 0.0, 400.0, 0.0]]


def angles(num_tokens, head_dim, dtype, device):
    angle = (
        random_tensor(num_tokens, head_dim // 2, dtype=torch.float64, device=device, seed=9) * 100
    )
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate64(x, cos, sin):
    (low, high), cos, sin = x.chunk(2, dim=-1), cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def terms64(x):
    """What a rotation adds up, at most."""
    low, high = x.abs().chunk(2, dim=-1)
    return torch.cat([low + high] * 2, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "num_tokens"), [(SHAPES[0], 0), (SHAPES[1], 5), (SHAPES[2], 1), (SHAPES[3], 3)]
)
def test_rope_equals_its_twin(device, dtype, shape, num_tokens):
    num_q_heads, num_kv_heads, head_dim = shape
    merged = random_tensor(
        num_tokens, num_q_heads + num_kv_heads, head_dim, dtype=dtype, device=device
    )
    q, k = merged[:, :num_q_heads], merged[:, num_q_heads:]
    cos, sin = angles(num_tokens, head_dim, dtype, device)
    got, want = fused_ops.rope(q, k, cos, sin), reference.rope(q, k, cos, sin)
    for one, twin, x in zip(got, want, (q, k), strict=True):
        assert_near(one, twin, rotate64(*doubled(x, cos, sin)), terms64(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "has_norm", "block_size"),
    [
        (SHAPES[0], True, 1),
        (SHAPES[1], False, 16),
        (SHAPES[1], True, 16),
        (SHAPES[2], True, 16),
        (SHAPES[3], False, 1),
    ],
)
def test_qk_norm_rope_store_equals_its_twin(device, dtype, shape, has_norm, block_size):
    num_q_heads, num_kv_heads, head_dim = shape
    size = (num_q_heads + 2 * num_kv_heads) * head_dim
    qkv = random_tensor(9, size, dtype=dtype, device=device)
    weights = [random_tensor(head_dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    if not has_norm:
        weights = [None, None]
    cos, sin = angles(9, head_dim, dtype, device)
    num_blocks = 32 // block_size
    pool = random_tensor(
        num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device
    )
    slots = torch.tensor([3, -1, 31, 0, 16, -1, 15, 8, 9], device=device)
    expected, before = pool.clone(), pool.clone()
    q = fused_ops.qk_norm_rope_store(qkv, *weights, 1e-6, cos, sin, pool, slots)
    want = reference.qk_norm_rope_store(qkv, *weights, 1e-6, cos, sin, expected, slots)

    heads = qkv.view(9, -1, head_dim).double()
    parts = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if has_norm:
        parts = [
            *(norm64(p, w.double(), 1e-6) for p, w in zip(parts[:2], weights, strict=True)),
            parts[2],
        ]
    angle = doubled(cos, sin)
    assert_near(q, want, rotate64(parts[0], *angle), terms64(parts[0]))
    exact = before.double()
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    exact[blocks, 0, offsets] = rotate64(parts[1], *angle)[kept]
    exact[blocks, 1, offsets] = parts[2][kept]
    terms = exact.abs()
    terms[blocks, 0, offsets] = terms64(parts[1])[kept]
    assert_near(pool, expected, exact, terms)
    untouched = torch.ones(num_blocks, block_size, dtype=torch.bool, device=device)
    untouched[blocks, offsets] = False
    by_slot = (0, 2, 1, 3, 4)  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
    assert torch.equal(pool.permute(by_slot)[untouched], before.permute(by_slot)[untouched])


def test_qk_norm_rope_store_equals_the_separate_kernels(device):
    num_q_heads, num_kv_heads, head_dim = 8, 2, 64
    qkv = random_tensor(5, 12 * head_dim, dtype=torch.float32, device=device)
    weight = random_tensor(head_dim, dtype=torch.float32, device=device, seed=1)
    cos, sin = angles(5, head_dim, torch.float32, device)
    pools = [torch.zeros(4, 2, 4, num_kv_heads, head_dim, device=device) for _ in range(2)]
    slots = torch.tensor([0, 5, 15, -1, 2], device=device)
    fused = fused_ops.qk_norm_rope_store(qkv, weight, weight, 1e-6, cos, sin, pools[0], slots)
    heads = qkv.view(5, -1, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k = fused_ops.rms_norm(q, weight, 1e-6), fused_ops.rms_norm(k, weight, 1e-6)
    q, k = fused_ops.rope(q, k, cos, sin)
    kv_store.store_kv(pools[1], slots, k, v)
    torch.testing.assert_close(fused, q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_qk_norm_rope_store_keeps_the_queries_that_it_returns(device, dtype, shape):
    num_q_heads, num_kv_heads, head_dim = shape
    qkv = random_tensor(6, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    weight = random_tensor(head_dim, dtype=dtype, device=device, seed=1)
    cos, sin = angles(6, head_dim, dtype, device)
    slots = torch.tensor([3, -1, 7, 0, -1, 5], device=device)
    ring_slots = torch.tensor([-1, 9, 4, -1, 0, 2], device=device)
    for kernels in (fused_ops, reference):
        pool = torch.zeros(4, 2, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
        ring = random_tensor(10, num_q_heads, head_dim, dtype=dtype, device=device, seed=2)
        plain_pool, expected = pool.clone(), ring.clone()
        plain = kernels.qk_norm_rope_store(qkv, weight, weight, 1e-6, cos, sin, plain_pool, slots)
        q = kernels.qk_norm_rope_store(
            qkv, weight, weight, 1e-6, cos, sin, pool, slots, ring, ring_slots
        )
        for token, entry in enumerate(ring_slots.tolist()):
            if entry >= 0:
                expected[entry] = q[token]
        assert torch.equal(ring, expected)
        assert torch.equal(q, plain)
        assert torch.equal(pool, plain_pool)


@pytest.mark.gpu
def test_qk_norm_rope_store_replays_from_a_cuda_graph_with_padded_slots():
    device, head_dim = torch.device("cuda"), 128
    qkv = random_tensor(6, 48 * head_dim, dtype=torch.bfloat16, device=device)
    weight = random_tensor(head_dim, dtype=torch.bfloat16, device=device, seed=1)
    cos, sin = angles(6, head_dim, torch.bfloat16, device)
    pool = torch.zeros(4, 2, 16, 8, head_dim, dtype=torch.bfloat16, device=device)
    ring = torch.zeros(32, 32, head_dim, dtype=torch.bfloat16, device=device)
    slots, ring_slots = torch.full((2, 6), -1, device=device).unbind()
    inputs = (qkv, weight, weight, 1e-6, cos, sin, pool, slots, ring, ring_slots)
    fused_ops.qk_norm_rope_store(*inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = fused_ops.qk_norm_rope_store(*inputs)
    graph.replay()
    assert not pool.any()
    assert not ring.any()
    slots[:4] = torch.tensor([0, 17, 40, 63], device=device)
    ring_slots[1:3] = torch.tensor([31, 5], device=device)
    graph.replay()
    expected = torch.zeros_like(pool)
    want = fused_ops.qk_norm_rope_store(qkv, weight, weight, 1e-6, cos, sin, expected, slots)
    assert torch.equal(q, want)
    assert torch.equal(pool, expected)
    assert torch.equal(ring[[31, 5]], q[1:3])
    ring[[31, 5]] = 0
    assert not ring.any()
