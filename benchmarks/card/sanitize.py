"""Runs every kernel that touches the KV cache once, small: `sanitize.sh` runs it under a sanitizer.

Knows nothing of what the results should be; the tests know.
"""

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

import kernels_b

from zipage_lang.kernels import kv_store
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.step_plan import BlockCopy, Compaction

SHAPE = dataclasses.replace(kernels_b.SHAPE, num_layers=2)
LENS, WINDOW, BLOCK_SIZE = (304, 17), 16, 16


def stores(cache: KVCache) -> None:
    """Two tokens, one of them padding, and two queries, one of them padding."""
    k, v = torch.randn(2, 2, 8, 128, dtype=torch.bfloat16, device="cuda").unbind(0)
    slots = torch.tensor([5, -1], device="cuda")
    q, lse = torch.randn(2, 32, 128, device="cuda").bfloat16(), torch.zeros(2, 32, device="cuda")
    tokens = torch.arange(2, device="cuda")
    for layer in range(SHAPE.num_layers):
        kv_store.store_kv(cache.kv[layer], slots, k, v)
        rings = (cache.queries[layer], cache.query_lse[layer])
        kv_store.store_queries(*rings, slots, tokens, q, lse)


def compactions(policy: str) -> tuple[Compaction, ...]:
    """The first copies a block before it is written; the second was compacted before."""
    tables = (tuple(range(1, 20)), (20, 21))
    items = []
    for row, (table, tail_len) in enumerate(zip(tables, LENS, strict=True)):
        keep = tail_len * 2 // 3
        after = table[: -(-keep // BLOCK_SIZE)]
        copies = (BlockCopy(after[0], 25),) if row == 0 else ()
        if copies:
            after = (25, *after[1:])
        items.append(
            Compaction(
                ident=row,
                row=row,
                policy=policy,
                protected_len=0,
                tail_len=tail_len,
                num_keep=keep,
                stateful_len=row * keep,
                logical_len=10_000 + tail_len,
                query_slot=row,
                num_queries=WINDOW,
                seed=row,
                block_ids_before=table,
                block_ids=after,
                block_copies=copies,
            )
        )
    return tuple(items)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        cache = KVCache(
            dataclasses.replace(SHAPE, dtype=dtype),
            num_blocks=26,
            block_size=BLOCK_SIZE,
            num_query_slots=2,
            window=WINDOW,
            device=torch.device("cuda"),
        )
        cache.kv.normal_()
        cache.queries.normal_()
        if dtype == torch.bfloat16:
            stores(cache)
        policies = {policy.name: policy for policy in (Zipage(), Random())}
        compressor = KVCompressor(cache, kernels_b.CompactionKernels(), policies)
        for name in policies:
            compressor.run(compactions(name))
    torch.cuda.synchronize()
    print("ran: store_kv, store_queries, copy_blocks, scoring, choosing, selecting, hole filling")


if __name__ == "__main__":
    main()
