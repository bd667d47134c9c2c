"""RMSNorm, rotary embedding and gated activation against their formulas in float64.

Knows nothing of models.
"""

import math

import pytest
import torch

from zipage_lang.kernels.reference.fused_ops import add_rms_norm, rms_norm, rope, silu_mul

TOLERANCES = [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def slow_rms_norm(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_rms_norm_is_the_formula(dtype, tolerance):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 7).to(dtype), torch.randn(7).to(dtype)
    before = x.clone()
    close(rms_norm(x, weight, 1e-3), slow_rms_norm(x, weight, 1e-3), tolerance)
    assert torch.equal(x, before)


def test_rms_norm_of_large_bfloat16_does_not_overflow():
    x = torch.full((1, 4), 1e25, dtype=torch.bfloat16)
    assert rms_norm(x / 1e10, torch.ones(4, dtype=torch.bfloat16), 1e-6).isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_add_rms_norm_returns_the_sum_and_its_norm(dtype, tolerance):
    torch.manual_seed(1)
    x, residual = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype)
    weight, before = torch.randn(6).to(dtype), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + before)
    close(normed, slow_rms_norm(total, weight, 1e-5), tolerance)
    assert torch.equal(residual, before)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_rope_turns_each_pair_by_its_angle(dtype, tolerance):
    torch.manual_seed(2)
    q, k = torch.randn(5, 3, 8).to(dtype), torch.randn(5, 2, 8).to(dtype)
    angles = torch.rand(5, 4) * 2 * math.pi
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for before, after in zip((q, k), rope(q, k, cos, sin), strict=True):
        pairs = torch.complex(before[..., :4].double(), before[..., 4:].double())
        turned = pairs * torch.complex(cos.double(), sin.double())[:, None]
        close(after, torch.cat([turned.real, turned.imag], -1), tolerance)


def test_rope_takes_views_and_leaves_them_alone():
    torch.manual_seed(3)
    qkv = torch.randn(2, 5, 4)
    before = qkv.clone()
    ones, zeros = torch.ones(2, 2), torch.zeros(2, 2)
    q, k = rope(qkv[:, :3], qkv[:, 3:4], ones, zeros)
    assert torch.equal(q, qkv[:, :3])
    assert torch.equal(k, qkv[:, 3:4])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_silu_mul_is_the_formula(dtype, tolerance):
    torch.manual_seed(4)
    gate_up = torch.randn(3, 10).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    close(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, tolerance)
    assert torch.equal(gate_up, before)
