"""What the cuda backend takes from cuBLAS or from the twins themselves, on a card.

Knows nothing of models.
"""

import pytest
import torch
from test_support.tensors import random_tensor

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.kernels.reference import scores as reference

pytestmark = pytest.mark.gpu
# Rows that decodes, padded buckets and chunks come in; odd sizes beside those of real models.
ROW_COUNTS = [1, 2, 3, 8, 16, 17, 33, 64, 100, 128, 257, 1000]
SIZES = [(37, 29), (256, 520), (1536, 4096), (4096, 1000)]  # in_size, out_size


def assert_is_product(found, x, weight, bias, bound):
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    assert found.shape == exact.shape
    error = (found.double() - exact).norm() / exact.norm()
    assert error < bound, f"{len(x)} rows: {error}"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_float64(dtype, bound, sizes, has_bias):
    backend, (in_size, out_size) = choose_backend("cuda", dtype), sizes
    like = {"dtype": dtype, "device": backend.device}
    weight = random_tensor(out_size, in_size, seed=1, **like)
    bias = random_tensor(out_size, seed=2, **like) if has_bias else None
    prepared = backend.prepare_linear(weight, bias)
    for num_rows in ROW_COUNTS:
        x = random_tensor(num_rows, in_size, seed=num_rows, **like)
        found = backend.linear(x, prepared)
        assert found.dtype == dtype
        assert_is_product(found, x, weight, bias, bound)


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_no_rows_and_of_views_are_taken(has_bias):
    backend = choose_backend("cuda", torch.bfloat16)
    like = {"dtype": torch.bfloat16, "device": backend.device}
    weight = random_tensor(96, 64, **like)
    bias = random_tensor(96, seed=1, **like) if has_bias else None
    prepared = backend.prepare_linear(weight, bias)
    assert backend.linear(random_tensor(0, 64, **like), prepared).shape == (0, 96)
    wide = random_tensor(12, 64, seed=2, **like)
    for x in (wide[::2], wide[3:]):
        assert_is_product(backend.linear(x, prepared), x, weight, bias, 4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_size", [1, 16])
def test_gathered_keys_and_values_equal_the_cpu_twins(dtype, block_size):
    backend = choose_backend("cuda", dtype)
    kv = random_tensor(300 // block_size, 2, block_size, 3, 24, dtype=dtype)
    order = torch.randperm(len(kv) * block_size, generator=torch.Generator().manual_seed(1))
    slots = torch.full((2, 101), -1)
    slots[0], slots[1, :57] = order[:101], order[101:158]
    on_card = kv.to(backend.device), slots.to(backend.device)
    for found, wanted in (
        (backend.gather_keys(*on_card), reference.gather_keys(kv, slots)),
        (backend.gather_values(*on_card), reference.gather_values(kv, slots)),
    ):
        assert torch.equal(found.cpu(), wanted)
