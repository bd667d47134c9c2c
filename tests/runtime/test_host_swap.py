"""Whole blocks of every pool tensor go to host memory and come back, into whatever blocks."""

import torch

from zipage_lang.runtime.host_swap import HostSwap
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.step_plan import BlockSwap


def make_cache() -> KVCache:
    shape = KVShape(num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    cache = KVCache(
        shape,
        num_blocks=9,
        block_size=4,
        num_query_slots=1,
        window=2,
        device=torch.device("cpu"),
    )
    for pool in cache.block_pools:
        pool.copy_(torch.randn(pool.shape).mul(1000).to(pool.dtype))
    return cache


def test_swapped_blocks_come_back_into_other_blocks_with_all_that_they_held():
    cache = make_cache()
    before = [pool.clone() for pool in cache.block_pools]
    swap = HostSwap(cache, num_host_blocks=5)
    swap.swap_out([BlockSwap(block_id=2, host_id=4), BlockSwap(block_id=7, host_id=0)])
    for pool in cache.block_pools:
        pool[:, [2, 7]] = 0
    swap.swap_in([BlockSwap(block_id=7, host_id=4), BlockSwap(block_id=1, host_id=0)])
    for pool, old in zip(cache.block_pools, before, strict=True):
        assert torch.equal(pool[:, 7], old[:, 2])
        assert torch.equal(pool[:, 1], old[:, 7])
        assert torch.equal(pool[:, 3:7], old[:, 3:7])


def test_no_host_memory_is_taken_before_the_first_swap():
    swap = HostSwap(make_cache(), num_host_blocks=10**12)
    swap.swap_out([])
    swap.swap_in([])
