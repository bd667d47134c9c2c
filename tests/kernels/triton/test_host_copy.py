"""Packing blocks into lines and back: Triton equal to its twin to the bit, and each the other's
reverse."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import host_copy
from zipage_lang.kernels.reference import host_copy as reference

# num_layers, num_blocks, block_size, num_kv_heads, head_dim
SHAPES = [(3, 7, 4, 2, 8), (2, 5, 1, 3, 16), (1, 9, 16, 8, 128), (4, 6, 16, 1, 80)]
DTYPES = [torch.float32, torch.bfloat16]


def make_pools(shape, dtype, device, seed=0):
    num_layers, num_blocks, block_size, heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)

    def bits(*sizes):
        return torch.randint(-(2**31), 2**31, sizes, dtype=torch.int64, generator=generator)

    kv = bits(num_layers, num_blocks, 2, block_size, heads, head_dim * dtype.itemsize // 2)
    state = (num_layers, num_blocks, block_size, heads)
    return [
        kv.to(torch.int16).view(dtype).to(device),  # any bit pattern, NaN among them
        bits(*state).to(torch.int32).view(torch.float32).to(device),
        bits(*state).to(torch.int32).to(device),
    ]


def as_bytes(pool):
    return pool.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_lines_equal_the_twins(device, shape, dtype):
    pools = make_pools(shape, dtype, device)
    block_ids = torch.tensor([4, 1, 3, 1], device=device)
    size = reference.line_bytes(pools)
    assert size >= sum(pool[:, 0].nbytes for pool in pools)
    lines, expected = (torch.zeros(4, size, dtype=torch.uint8, device=device) for _ in range(2))
    host_copy.pack_blocks(pools, block_ids, lines)
    reference.pack_blocks(pools, block_ids, expected)
    assert torch.equal(lines, expected)
    assert expected.any()


@pytest.mark.parametrize("module", [host_copy, reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacked_lines_bring_every_byte_into_other_blocks_and_touch_no_other(
    device, shape, dtype, module
):
    source, target = make_pools(shape, dtype, device), make_pools(shape, dtype, device, seed=1)
    before = [pool.clone() for pool in target]
    lines = torch.zeros(2, reference.line_bytes(source), dtype=torch.uint8, device=device)
    module.pack_blocks(source, torch.tensor([2, 0], device=device), lines)
    module.unpack_blocks(target, torch.tensor([1, 4], device=device), lines)
    for pool, old, new in zip(source, before, target, strict=True):
        assert torch.equal(as_bytes(new[:, 1]), as_bytes(pool[:, 2]))
        assert torch.equal(as_bytes(new[:, 4]), as_bytes(pool[:, 0]))
        others = [0, 2, 3, *range(5, pool.shape[1])]
        assert torch.equal(as_bytes(new[:, others]), as_bytes(old[:, others]))


def test_no_blocks_are_no_launch(device):
    pools = make_pools(SHAPES[0], torch.float32, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    lines = torch.zeros(0, reference.line_bytes(pools), dtype=torch.uint8, device=device)
    before = [pool.clone() for pool in pools]
    host_copy.pack_blocks(pools, none, lines)
    host_copy.unpack_blocks(pools, none, lines)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(as_bytes(pool), as_bytes(old))
