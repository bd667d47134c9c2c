"""The acts of strict mode one by one: a row's bits are the same alone and in any batch.

The card's kernels run in Triton's interpreter here, and compiled where there is a card.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_support.strict_steps import HEADS, check_attention, drawn, steps

from zipage_lang.kernels.reference import exact, strict_ops, strict_sampling
from zipage_lang.kernels.reference import fused_ops as plain_ops
from zipage_lang.kernels.reference.linear import LinearProducts
from zipage_lang.kernels.reference.same_bits import agreeing_sizes, cancelling, in_sizes
from zipage_lang.kernels.reference.strict_attention import StrictAttention
from zipage_lang.kernels.reference.strict_linear import StrictProducts

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# what is exact


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 200), before=st.integers(0, 50))
def test_a_place_in_a_tensor_changes_no_element(seed, length, before):
    """Torch's own exp and silu differ between a vector and a loop's rest."""
    x = drawn(before + length, seed=seed) * 20
    for act in (exact.exp2, exact.silu, lambda values: exact.log2(values.abs() + 1e-3)):
        assert torch.equal(act(x)[before:], act(x[before:].clone()))


def test_exact_functions_are_near_the_true_ones():
    x = torch.linspace(-125, 60, 10_001)
    torch.testing.assert_close(exact.exp2(x).double(), x.double().exp2(), rtol=3e-7, atol=0)
    torch.testing.assert_close(
        exact.log2(x.exp2()), x.exp2().double().log2().float(), rtol=2e-7, atol=2e-7
    )
    y = torch.linspace(-90, 90, 10_001)
    torch.testing.assert_close(exact.silu(y), torch.nn.functional.silu(y), rtol=1e-6, atol=1e-7)
    assert exact.exp2(torch.tensor([-torch.inf, -128.0])).tolist() == [0.0, 0.0]


@given(parts=st.integers(1, 20), padding=st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_zeros_behind_the_last_part_change_no_sum(parts, padding):
    values = drawn(parts, 5, seed=parts)
    padded = torch.cat([values, torch.zeros(padding, 5)])
    assert torch.equal(exact.sum_parts(values, 0), exact.sum_parts(padded, 0))


@pytest.mark.parametrize("size", [1, 7, 64, 577])
def test_a_folded_sum_is_the_sum(size):
    x = drawn(3, size)
    torch.testing.assert_close(exact.sum_last(x)[:, 0], x.double().sum(-1).float())


# which sizes agree


def test_a_size_that_sums_in_another_order_is_not_taken():
    """A product that goes backwards from four rows on, as a BLAS may."""

    def product(rows):
        order = range(96) if len(rows) < 4 else reversed(range(96))
        total = torch.zeros(len(rows), 8)
        for place in order:
            total += rows[:, place, None] * right[place]
        return total

    row, right = cancelling(torch.empty(1, 96), torch.empty(96, 8))
    assert agreeing_sizes(product, [row], (1, 2, 4, 8), bases=(2,)) == (1, 2)
    assert agreeing_sizes(product, [row], (1, 2, 4, 8), bases=(4,)) == (4, 8)


def test_a_base_whose_places_differ_is_passed_over():
    row, right = cancelling(torch.empty(1, 96), torch.empty(96, 8))

    def product(rows):
        out = rows @ right
        out[7:] += 1.0
        return out

    assert agreeing_sizes(product, [row], ())[0] == 4


@given(
    num_rows=st.integers(1, 90), sizes=st.sets(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1)
)
@settings(max_examples=60, deadline=None)
def test_rows_run_only_in_the_given_sizes(num_rows, sizes):
    x = drawn(num_rows, 3)
    seen = []

    def product(rows):
        seen.append(len(rows))
        return rows * 2

    assert torch.equal(in_sizes(product, [x], sorted(sizes)), x * 2)
    assert set(seen) <= sizes


def test_a_cancelling_probe_sums_to_rounding_errors():
    left, right = cancelling(torch.empty(1, 200), torch.empty(200, 50))
    assert (left @ right).abs().max() < 1e-3 * left.abs().max() * right.abs().max()
    assert ((left @ right) != (left.flip(1) @ right.flip(0))).float().mean() > 0.5


# the acts on the CPU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_size", "out_size"), [(72, 216), (150, 72), (64, 1000), (33, 7)])
def test_a_row_of_a_product_is_the_same_in_any_batch(dtype, in_size, out_size):
    weight, bias = drawn(out_size, in_size, dtype=dtype), drawn(out_size, seed=1, dtype=dtype)
    x = drawn(300, in_size, seed=2, dtype=dtype)
    for products, has_bias in ((StrictProducts(), True), (StrictProducts(), False)):
        prepared = products.prepare(weight, bias if has_bias else None)
        whole = products.linear(x, prepared)
        near = torch.nn.functional.linear(x.double(), weight.double()) + has_bias * bias.double()
        torch.testing.assert_close(whole.double(), near, atol=0.3, rtol=3e-2)
        for start, end in ((0, 1), (3, 5), (0, 300), (17, 40), (100, 233), (299, 300)):
            assert torch.equal(products.linear(x[start:end], prepared), whole[start:end])


def test_the_plain_products_differ_between_batches():
    """So the test above can fail."""
    products = LinearProducts()
    prepared = products.prepare(drawn(216, 72))
    x = drawn(300, 72, seed=2)
    whole = products.linear(x, prepared)
    assert any(not torch.equal(products.linear(x[:n], prepared), whole[:n]) for n in (1, 2, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "block_size"), [*zip(HEADS, (16, 1, 64, 4), strict=True)])
def test_a_token_attends_alike_alone_and_in_any_chunk(dtype, heads, block_size):
    check_attention(StrictAttention(), *steps(dtype, heads, block_size), heads, block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_rotation_are_near_the_plain_ones_and_alike_anywhere(dtype):
    x, weight = drawn(9, 75, dtype=dtype), drawn(75, seed=1, dtype=dtype)
    normed = strict_ops.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, plain_ops.rms_norm(x, weight, 1e-5), atol=2e-2, rtol=2e-2)
    assert torch.equal(normed[4:5], strict_ops.rms_norm(x[4:5].clone(), weight, 1e-5))
    q, k = drawn(9, 4, 20, dtype=dtype), drawn(9, 2, 20, seed=3, dtype=dtype)
    cos, sin = drawn(9, 10, seed=4, dtype=dtype), drawn(9, 10, seed=5, dtype=dtype)
    rotated = strict_ops.rope(q, k, cos, sin)
    for one, other in zip(rotated, plain_ops.rope(q, k, cos, sin), strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)
    lone = strict_ops.rope(q[4:5], k[4:5], cos[4:5], sin[4:5])
    assert torch.equal(lone[0], rotated[0][4:5])
    assert torch.equal(lone[1], rotated[1][4:5])


def test_a_line_is_scored_alike_anywhere():
    logits, token_ids = drawn(7, 1003), torch.arange(7)
    whole = strict_sampling.score_tokens(logits, token_ids, 3)
    for line in range(7):
        lone = strict_sampling.score_tokens(logits[line : line + 1], token_ids[line : line + 1], 3)
        for one, all_lines in zip(lone, whole, strict=True):
            assert torch.equal(one[0], all_lines[line])
