"""Runs every kernel of a compaction once, small: `sanitize.sh` runs it under a sanitizer.

Inputs are drawn on the CPU, so that few kernels of others run beside ours. Knows nothing of what
the results should be; the tests know.
"""

import dataclasses
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))

import kernels_b

from zipage_lang.kernels import forecast, fused_ops, kv_store, scores
from zipage_lang.kernels.backend import Forecast, TailQueries
from zipage_lang.kernels.hopper import scoring
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.policy import Calibration
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.policies.zipage2 import Zipage2
from zipage_lang.runtime.step_plan import BlockCopy, Compaction

SHAPE = dataclasses.replace(kernels_b.SHAPE, num_layers=2)
LENS, WINDOW, BLOCK_SIZE = (304, 17), 16, 16
SCALE, THRESHOLD = 0.1, 0.5
SCORED = [  # heads, group, head_dim, chunk, rows, tail_len, weight of a direction all keys share
    (8, 4, 128, 256, 1, 300, 0.0),
    (3, 3, 64, 100, 2, 230, 0.6),
    (2, 4, 128, 256, 1, 257, 1.0),
    (8, 4, 128, 256, 50, 700, 3.0),  # a CTA has several chunks
    (8, 4, 128, 256, 50, 700, 1.0),
]


def stores(cache: KVCache) -> None:
    """Two tokens, one of them padding, with their queries and log-sum-exps."""
    k, v = torch.randn(2, 2, 8, 128).bfloat16().cuda().unbind(0)
    slots = torch.tensor([5, -1], device="cuda")
    qkv, weight = torch.randn(2, 48 * 128).bfloat16().cuda(), torch.ones(128).bfloat16().cuda()
    cos, sin = torch.randn(2, 2, 64).bfloat16().cuda().unbind(0)
    for layer in range(SHAPE.num_layers):
        kv_store.store_kv(cache.kv[layer], slots, k, v)
        ring = (cache.queries[layer], slots)
        fused_ops.qk_norm_rope_store(
            qkv, weight, weight, 1e-6, cos, sin, cache.kv[layer], slots, *ring
        )
    lse = torch.zeros(SHAPE.num_layers, 2, 32, device="cuda")
    kv_store.store_lse(cache.query_lse, slots, lse)


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


def compact(dtype: torch.dtype) -> None:
    cache = KVCache(
        dataclasses.replace(SHAPE, dtype=dtype),
        num_blocks=26,
        block_size=BLOCK_SIZE,
        num_query_slots=2,
        window=WINDOW,
        device=torch.device("cuda"),
    )
    cache.kv.copy_(torch.randn(cache.kv.shape))
    cache.queries.copy_(torch.randn(cache.queries.shape))
    if dtype == torch.bfloat16:
        stores(cache)
    policies = {policy.name: policy for policy in (Zipage(), Zipage2(), Random())}
    known = Calibration(None, random_forecast(SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim))
    compressor = KVCompressor(
        cache, kernels_b.CompactionKernels(), policies, calibration_of=lambda _: known
    )
    for name in policies:
        compressor.run(compactions(name))


def random_forecast(num_layers: int, num_kv_heads: int, head_dim: int) -> Forecast:
    weights = torch.randn(2, num_layers, num_kv_heads, head_dim).cuda().unbind()
    ages, frequencies = torch.randn(num_layers, num_kv_heads), torch.rand(head_dim // 2)
    return Forecast(*weights, ages.cuda(), frequencies.cuda())


def draw_tail(
    heads: int, group: int, head_dim: int, num_rows: int, tail_len: int, shared: float
) -> tuple[Tensor, Tensor, Tensor, TailQueries]:
    """Rows that all have the same slots, shuffled, one of them a hole; positions in order."""
    num_blocks = -(-tail_len // BLOCK_SIZE)
    shape = (num_blocks, 2, BLOCK_SIZE, heads, head_dim)
    kv = torch.randn(shape) + shared * torch.randn(1, 2, 1, heads, head_dim)
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:tail_len].repeat(num_rows, 1)
    slots[:, tail_len // 2] = -1
    positions = torch.arange(tail_len, dtype=torch.int32).repeat(num_rows, heads, 1)
    ring = torch.randn(WINDOW, heads * group, head_dim)
    queries = TailQueries(
        ring.bfloat16().cuda(),
        torch.full((WINDOW, heads * group), 8.0).cuda(),
        torch.arange(WINDOW).repeat(num_rows, 1).cuda(),
        torch.arange(tail_len - WINDOW, tail_len).repeat(num_rows, 1).cuda(),
    )
    return kv.bfloat16().cuda(), slots.cuda(), positions.cuda(), queries


def score() -> None:
    """The Hopper kernel for all sizes, Triton's for the first ones; then their combination."""
    for heads, group, head_dim, chunk, num_rows, tail_len, shared in SCORED:
        tail = draw_tail(heads, group, head_dim, num_rows, tail_len, shared)
        rest = (SCALE, chunk, THRESHOLD)
        assert scoring.takes(tail[0], tail[3], chunk), "the Hopper kernels are not there"
        mass, similarity = scoring.mass_and_similarity(*tail, *rest)
        if num_rows == 1:
            scores.mass_and_similarity_by_triton(*tail, *rest)
            lens = torch.tensor([tail_len], device="cuda")
            scores.combine_scores(
                mass, similarity, mass, lens, lens > 0,
                decay=0.8, pool_kernel=5, temperature=0.4, mass_weight=0.2,
            )  # fmt: skip
        torch.cuda.synchronize()
        assert math.isfinite(float(mass.cpu().sum())), "a score is no number"


def forecasts() -> None:
    """Rows of two tiles, old slots and new ones, in a pool that ends where the last block does."""
    for heads, head_dim, dtype in ((8, 128, torch.bfloat16), (3, 14, torch.float32)):
        kv, slots, positions, _ = draw_tail(heads, 1, head_dim, 2, 150, 0.0)
        score, base = forecast.forecast_scores(
            kv.to(dtype),
            torch.randn(kv.shape[0], *kv.shape[2:4]).cuda(),
            slots,
            positions,
            torch.tensor([131, 0], device="cuda"),
            torch.tensor([150, 90_000], device="cuda"),
            torch.tensor([1, 0], device="cuda"),
            random_forecast(2, heads, head_dim),
        )
        torch.cuda.synchronize()
        assert math.isfinite(float((score + base).cpu().sum())), "a forecast is no number"


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        compact(dtype)
    score()
    forecasts()
    torch.cuda.synchronize()
    print("ran: store_kv, qk_norm_rope_store, store_lse, copy_blocks, expand_tails, scoring by our "
          "kernel and by Triton's, combine_scores, forecast_scores, choosing by blend and tiers, "
          "selecting, hole filling")  # fmt: skip


if __name__ == "__main__":
    main()
