"""The Triton range of values against its twin, and the twin against numbers made by hand."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import ranges
from zipage_lang.kernels.reference import ranges as reference


def world(device, *, num_rows, max_tail, block_size, num_heads, head_dim, dtype):
    generator = torch.Generator().manual_seed(max_tail + head_dim)
    num_slots = num_rows * max_tail + block_size
    num_blocks = -(-num_slots // block_size)
    shape = (num_blocks, 2, block_size, num_heads, head_dim)
    kv = torch.randn(shape, generator=generator).to(dtype)
    kv[:, 0] = math.nan  # keys do not matter
    slots = torch.randperm(num_blocks * block_size, generator=generator)
    slots = slots[: num_rows * max_tail].view(num_rows, max_tail)
    slots[0, max_tail // 2 :] = -1
    return kv.to(device), slots.to(device)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_rows": 2, "max_tail": 37, "block_size": 16, "num_heads": 2, "head_dim": 24},
        {"num_rows": 1, "max_tail": 5, "block_size": 1, "num_heads": 3, "head_dim": 8},
        pytest.param(
            {"num_rows": 3, "max_tail": 2304, "block_size": 16, "num_heads": 8, "head_dim": 128},
            marks=pytest.mark.gpu,
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_range_equals_its_twin(device, sizes, dtype):
    kv, slots = world(device, **sizes, dtype=dtype)
    found = ranges.value_range(kv, slots)
    assert torch.equal(found, reference.value_range(kv, slots))
    assert not found[0, :, slots.shape[1] // 2 :].any()


def test_value_range_is_the_largest_dimension_less_the_smallest():
    kv = torch.zeros(1, 2, 2, 1, 4)
    kv[0, 1, 1, 0] = torch.tensor([0.5, -2.0, 3.0, 1.0])
    found = reference.value_range(kv, torch.tensor([[1, 0, -1]]))
    assert found.tolist() == [[[5.0, 0.0, 0.0]]]
