"""Writes into the KV pool, the query rings and whole blocks, against plain indexing.

Knows nothing of models.
"""

import pytest
import torch

from zipage_lang.kernels.reference.kv_store import (
    copy_blocks,
    store_kv,
    store_lse,
    store_ring_queries,
)


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_store_kv_writes_the_named_slots_and_no_others(block_size):
    torch.manual_seed(0)
    layer_kv = torch.randn(6, 2, block_size, 3, 4)
    slots = torch.randperm(6 * block_size)[:5]
    k, v = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    expected = layer_kv.clone()
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 0, slot % block_size] = k[token]
        expected[slot // block_size, 1, slot % block_size] = v[token]
    store_kv(layer_kv, slots, k, v)
    assert torch.equal(layer_kv, expected)


def test_store_kv_takes_views_of_a_merged_projection():
    torch.manual_seed(1)
    cache = torch.zeros(2, 4, 2, 2, 1, 4)
    k, v = torch.randn(3, 2, 4).split(1, dim=1)
    store_kv(cache[1], torch.tensor([2, 3, 7]), k, v)
    assert torch.equal(cache[1, 1, 0], k[:2])
    assert torch.equal(cache[1, 3, 1, 1], v[2])
    assert torch.equal(cache[0], torch.zeros(4, 2, 2, 1, 4))


RING_SLOTS = [[4, -1, 0, 5, -1], [-1] * 5, [3, 1, 0, 5, 2]]


@pytest.mark.parametrize("ring_slots", RING_SLOTS)
def test_store_ring_queries_writes_kept_queries_and_no_others(ring_slots):
    torch.manual_seed(2)
    ring, q = torch.randn(6, 2, 4), torch.randn(5, 2, 4)
    expected = ring.clone()
    for token, slot in enumerate(ring_slots):
        if slot >= 0:
            expected[slot] = q[token]
    store_ring_queries(ring, torch.tensor(ring_slots), q)
    assert torch.equal(ring, expected)


@pytest.mark.parametrize("ring_slots", RING_SLOTS)
def test_store_lse_writes_kept_tokens_of_every_layer_and_no_others(ring_slots):
    torch.manual_seed(2)
    ring_lse, lse = torch.randn(3, 6, 2), torch.randn(3, 5, 2)
    expected = ring_lse.clone()
    for layer in range(3):
        for token, slot in enumerate(ring_slots):
            if slot >= 0:
                expected[layer, slot] = lse[layer, token]
    store_lse(ring_lse, torch.tensor(ring_slots), lse)
    assert torch.equal(ring_lse, expected)


def test_copy_blocks_copies_all_layers_of_every_pool():
    torch.manual_seed(3)
    pools = [torch.randn(3, 5, 2, 4), torch.randint(9, (3, 5, 2))]
    before = [pool.clone() for pool in pools]
    copy_blocks(pools, torch.tensor([1, 2]), torch.tensor([4, 1]))
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[:, 4], old[:, 1])
        assert torch.equal(pool[:, 1], old[:, 2])
        assert torch.equal(pool[:, [0, 2, 3]], old[:, [0, 2, 3]])
