"""Prepared products against float64: with and without packs, at every small batch, under a limit.

Knows nothing of models.
"""

import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.kernels.reference import linear as module
from zipage_lang.kernels.reference.fused_ops import rms_norm
from zipage_lang.kernels.reference.linear import MAX_PACKED_ROWS, LinearProducts

ROW_COUNTS = [0, 1, 2, 3, 8, 15, 16, 17, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 70]
has_packs = pytest.mark.skipif(not module._can_pack(), reason="this torch can't pack weights")


def make_weight(out_size=37, in_size=29, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    return weight, torch.randn(out_size, generator=generator).to(dtype)


def assert_is_product(actual, x, weight, bias, tolerance):
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    assert actual.dtype == x.dtype


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("max_pack_bytes", [0, 2**20])
def test_linear_is_the_product_for_every_number_of_rows(dtype, tolerance, has_bias, max_pack_bytes):
    weight, bias = make_weight(dtype=dtype)
    products = LinearProducts(max_pack_bytes)
    prepared = products.prepare(weight, bias if has_bias else None)
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, 29).to(dtype)
        before = x.clone()
        with torch.inference_mode():
            actual = products.linear(x, prepared)
        assert_is_product(actual, x, weight, bias if has_bias else None, tolerance)
        assert torch.equal(x, before)


@has_packs
def test_pack_is_made_on_first_use_by_a_few_rows_and_kept():
    products = LinearProducts()
    prepared = products.prepare(*make_weight())
    products.linear(torch.randn(1, 29), prepared)
    products.linear(torch.randn(MAX_PACKED_ROWS + 1, 29), prepared)
    assert prepared.pack is None
    products.linear(torch.randn(2, 29), prepared)
    pack = prepared.pack
    assert pack is not None
    products.linear(torch.randn(MAX_PACKED_ROWS, 29), prepared)
    assert prepared.pack is pack


@has_packs
def test_packs_stay_under_the_byte_limit_of_their_instance():
    weight, _ = make_weight()
    products = LinearProducts(2 * weight.nbytes)
    prepared = [products.prepare(weight) for _ in range(3)]
    small = products.prepare(weight[:1])
    assert [each.may_pack for each in [*prepared, small]] == [True, True, False, False]
    x = torch.randn(4, 29)
    for each in prepared:
        assert_is_product(products.linear(x, each), x, weight, None, 1e-5)
    assert [each.pack is None for each in prepared] == [False, False, True]
    assert LinearProducts(weight.nbytes).prepare(weight).may_pack


def test_bfloat16_weights_are_never_packed():
    weight, _ = make_weight(dtype=torch.bfloat16)
    assert not LinearProducts().prepare(weight).may_pack


def test_without_the_packing_operators_the_plain_product_is_used(monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    products = LinearProducts()
    weight, bias = make_weight()
    prepared = products.prepare(weight, bias)
    x = torch.randn(4, 29)
    assert_is_product(products.linear(x, prepared), x, weight, bias, 1e-5)
    assert prepared.pack is None


def test_strided_rows_and_strided_weights_are_taken():
    weight, bias = make_weight(out_size=20, in_size=24)
    wide = torch.randn(6, 48)
    for view in (weight, weight.T.contiguous().T, weight[::2]):
        products = LinearProducts()
        prepared = products.prepare(view, bias[: len(view)].clone())
        for x in (wide[:, ::2], wide[::2, :24]):
            actual = products.linear(x, prepared)
            assert_is_product(actual, x, view, bias[: len(view)], 1e-5)


def test_a_row_differs_between_batch_sizes_by_rounding_only():
    weight, _ = make_weight(out_size=64, in_size=512)
    products = LinearProducts()
    prepared = products.prepare(weight)
    x = torch.randn(40, 512)
    whole = products.linear(x, prepared)
    scale = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)  # [40, 64], bounds each dot product
    for num_rows in range(1, 40):
        part = products.linear(x[:num_rows], prepared)
        assert ((part - whole[:num_rows]).abs() <= 1e-6 * scale[:num_rows]).all()


def test_cpu_backends_share_no_budget():
    first, second = choose_backend("cpu"), choose_backend("cpu")
    weight, bias = make_weight()
    x = torch.randn(3, 29)
    for backend in (first, second):
        actual = backend.linear(x, backend.prepare_linear(weight, bias))
        assert_is_product(actual, x, weight, bias, 1e-5)
    assert first.linear.__self__ is not second.linear.__self__


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("index", [[], [2], [4, 0, 1]])
def test_rows_of_a_stream_hold_all_that_was_added_to_it(is_strict, index):
    backend = choose_backend("cpu", deterministic=is_strict)
    weight, bias = make_weight(29, 32)
    scale, hidden, x = torch.randn(29), torch.randn(5, 29), torch.randn(5, 32)
    stream = backend.open_stream(hidden, 1e-3)
    backend.add_linear(stream, x, backend.prepare_linear(weight, bias))
    chosen = torch.tensor(index, dtype=torch.int64)
    cut = backend.rows_of_stream(stream, chosen)
    whole = backend.normed_stream(stream, scale)
    assert torch.equal(backend.normed_stream(cut, scale), whole[chosen])
    backend.add_linear(cut, x[chosen], backend.prepare_linear(weight, bias))
    assert torch.equal(backend.normed_stream(stream, scale), whole), "the cut is one of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_is_normalised_multiplied_and_added_to_as_by_hand(dtype):
    backend = choose_backend("cpu")
    up, _ = make_weight(2 * 32, 29, dtype, seed=1)
    down, bias = make_weight(29, 32, dtype, seed=2)
    head, _ = make_weight(11, 29, dtype, seed=3)
    scale, hidden = torch.randn(29).to(dtype), torch.randn(5, 29).to(dtype)
    before = hidden.clone()
    stream = backend.open_stream(hidden, 1e-3)
    inner = backend.normed_gated_linear(stream, backend.prepare_gated_linear(up, None, scale))
    backend.add_linear(stream, inner, backend.prepare_linear(down, bias))
    normed = rms_norm(before, scale, 1e-3)
    gate, up_part = (normed @ up.T).chunk(2, dim=1)
    total = before + ((torch.nn.functional.silu(gate) * up_part) @ down.T + bias)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    found = backend.normed_stream(stream, scale)
    torch.testing.assert_close(found, rms_norm(total, scale, 1e-3), atol=tolerance, rtol=tolerance)
    logits = backend.normed_linear(stream, backend.prepare_linear(head, None, scale))
    assert_is_product(logits, found, head, None, tolerance)
    assert torch.equal(hidden, before)
