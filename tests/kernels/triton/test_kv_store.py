"""The Triton stores and block copies against their twins: equal to the bit."""

import pytest
import torch
from test_support.tensors import random_tensor

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import kv_store
from zipage_lang.kernels.reference import kv_store as reference

DTYPES = [torch.float32, torch.bfloat16]
# num_q_heads, num_kv_heads, head_dim
SHAPES = [(4, 4, 16), (9, 3, 64), (8, 1, 128), (6, 2, 80)]


def distinct_slots(num_tokens, num_slots, device):
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens]
    slots[::3] = -1
    return slots.to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "block_size", "num_tokens"),
    [(SHAPES[0], 1, 5), (SHAPES[1], 16, 1), (SHAPES[2], 16, 23), (SHAPES[3], 64, 7)],
)
def test_store_kv_equals_its_twin_and_drops_negative_slots(
    device, dtype, shape, block_size, num_tokens
):
    num_q_heads, num_kv_heads, head_dim = shape
    num_blocks = 2 + 64 // block_size
    pool = random_tensor(
        num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device
    )
    expected = pool.clone()
    slots = distinct_slots(num_tokens, num_blocks * block_size, device)
    size = (num_q_heads + 2 * num_kv_heads) * head_dim
    merged = random_tensor(num_tokens, size, dtype=dtype, device=device, seed=2)
    heads = merged.view(num_tokens, -1, head_dim)
    k, v = heads[:, num_q_heads:-num_kv_heads], heads[:, -num_kv_heads:]  # strided views
    kv_store.store_kv(pool, slots, k, v)
    reference.store_kv(expected, slots, k, v)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("store", [kv_store.store_kv, reference.store_kv])
def test_store_kv_of_padding_alone_leaves_the_pool_as_it_is(device, store):
    pool = random_tensor(3, 2, 4, 2, 8, dtype=torch.float32, device=device)
    before, k = pool.clone(), torch.full((6, 2, 8), torch.nan, device=device)
    store(pool, torch.full((6,), -1, device=device), k, k)
    assert torch.equal(pool, before)


def test_store_kv_of_no_tokens_is_allowed(device):
    pool = random_tensor(3, 2, 4, 2, 8, dtype=torch.float32, device=device)
    before, k = pool.clone(), pool.new_empty((0, 2, 8))
    kv_store.store_kv(pool, torch.empty(0, dtype=torch.int64, device=device), k, k)
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("num_layers", "num_tokens", "num_q_heads"), [(1, 1, 4), (8, 9, 9), (19, 5, 32), (36, 2, 6)]
)
def test_store_lse_equals_its_twin_and_drops_negative_slots(
    device, num_layers, num_tokens, num_q_heads
):
    shape = (num_layers, 20, num_q_heads)
    ring_lse = random_tensor(*shape, dtype=torch.float32, device=device, seed=1)
    lse = random_tensor(num_layers, num_tokens, num_q_heads, dtype=torch.float32, device=device)
    slots = distinct_slots(num_tokens + 1, 20, device)[1:].contiguous()
    assert bool((slots >= 0).any())
    expected = ring_lse.clone()
    kv_store.store_lse(ring_lse, slots, lse)
    reference.store_lse(expected, slots, lse)
    assert torch.equal(ring_lse, expected)


def test_store_lse_of_padding_alone_and_of_no_tokens_changes_nothing(device):
    ring_lse = random_tensor(3, 5, 2, dtype=torch.float32, device=device)
    before = ring_lse.clone()
    for num_tokens in (6, 0):
        lse = torch.full((3, num_tokens, 2), torch.nan, device=device)
        kv_store.store_lse(ring_lse, torch.full((num_tokens,), -1, device=device), lse)
        assert torch.equal(ring_lse, before)


@pytest.mark.parametrize("num_copies", [1, 3, 17])
def test_copy_blocks_equals_its_twin_on_every_pool(device, num_copies):
    pools = [
        random_tensor(3, 40, 2, 5, 2, 24, dtype=torch.bfloat16, device=device),
        random_tensor(3, 40, 5, 3, dtype=torch.float32, device=device),
        torch.arange(3 * 40 * 5, device=device).view(3, 40, 5),
    ]
    expected = [pool.clone() for pool in pools]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4)).to(device)
    src, dst = order[:num_copies], order[20 : 20 + num_copies]
    kv_store.copy_blocks(pools, src, dst)
    reference.copy_blocks(expected, src, dst)
    for pool, want in zip(pools, expected, strict=True):
        assert torch.equal(pool, want)


def test_copy_blocks_reads_every_source_before_it_writes(device):
    pool = random_tensor(2, 9, 16, 4, dtype=torch.float32, device=device)
    before = pool.clone()
    src = torch.arange(9, device=device)
    dst = src.roll(-1)  # every block is both read and written
    kv_store.copy_blocks([pool], src, dst)
    assert torch.equal(pool[:, dst], before[:, src])


def test_copy_blocks_beyond_one_tile_equals_its_twin(device, monkeypatch):
    monkeypatch.setattr(kv_store, "TILE_COPIES", (2, 4))
    pool = random_tensor(3, 12, 6, dtype=torch.float32, device=device)
    before, src = pool.clone(), torch.arange(12, device=device)
    kv_store.copy_blocks([pool], src, src.roll(5))
    assert torch.equal(pool[:, src.roll(5)], before[:, src])
