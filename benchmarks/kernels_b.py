"""Times the compaction kernels, and whole compactions, at Qwen3-8B shapes: `python kernels_b.py`.

    python kernels_b.py --requests 1 8 32 --block-sizes 16 64

Kernels work on all layers at once, as the compressor calls them where scratch allows; their keys
are far larger than the L2. Bytes are what must move: every input read once, every output written
once. A compaction is timed on the device and, apart, until the host may go on.
Prints a table, then one JSON line.
Knows nothing of the engine.
"""

import argparse
import functools
import json
import statistics
import time

import torch
import triton
from kernel_timing import Case
from kernel_timing import measure as measure_case
from torch import Tensor

from zipage_lang.kernels import (
    blend,
    compact,
    forecast,
    kv_store,
    scores,
    select,
    tails,
    tiers,
)
from zipage_lang.kernels.backend import TailQueries
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.step_plan import Compaction

SHAPE = KVShape(
    num_layers=36, num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
)  # fmt: skip
KV_BUDGET, EVICT_INTERVAL, WINDOW, CHUNK, THRESHOLD = 2048, 256, 16, 256, 0.5
TAIL = KV_BUDGET + EVICT_INTERVAL
SCALE = SHAPE.head_dim**-0.5
FIRST_LOGICAL_LEN = 1_000_000  # past all positions that stand in the pool at the start
NUM_COMPACTIONS = 15


class CompactionKernels:
    """As much of a backend as a compaction calls."""

    name = "triton"
    device = torch.device("cuda")
    copy_blocks = staticmethod(kv_store.copy_blocks)
    mass_and_similarity = staticmethod(scores.mass_and_similarity)
    combine_scores = staticmethod(scores.combine_scores)
    protect_slots = staticmethod(select.protect_slots)
    select_top_k = staticmethod(select.select_top_k)
    fill_holes = staticmethod(compact.fill_holes)
    expand_tails = staticmethod(tails.expand_tails)
    compact_blend = staticmethod(blend.compact_blend)
    forecast_scores = staticmethod(forecast.forecast_scores)
    compact_tiers = staticmethod(tiers.compact_tiers)


class World:
    """A cache full of random keys, and the tails of `num_requests` on shuffled blocks of it."""

    def __init__(self, num_requests: int, block_size: int) -> None:
        self.num_requests, self.block_size = num_requests, block_size
        blocks_each = TAIL // block_size
        self.cache = KVCache(
            SHAPE,
            num_blocks=num_requests * blocks_each + 1,
            block_size=block_size,
            num_query_slots=num_requests,
            window=WINDOW,
            device=torch.device("cuda"),
        )
        for layer in range(SHAPE.num_layers):
            self.cache.kv[layer].normal_()
        self.cache.queries.normal_()
        self.cache.query_lse.fill_(8.0)
        slot_numbers = torch.arange(self.cache.num_blocks * block_size, dtype=torch.int32)
        self.cache.position.copy_(slot_numbers.view(-1, block_size, 1))
        order = torch.randperm(self.cache.num_blocks - 1)[: num_requests * blocks_each] + 1
        self.tables = order.view(num_requests, blocks_each)

    def slots(self) -> Tensor:
        """int64 [num_rows, TAIL], rows by layer, then by request."""
        offsets = torch.arange(self.block_size)
        per_layer = (self.tables[..., None] * self.block_size + offsets).flatten(1)
        first = torch.arange(SHAPE.num_layers) * self.cache.num_blocks * self.block_size
        return (first[:, None, None] + per_layer).flatten(0, 1).cuda()

    def queries(self) -> TailQueries:
        num_rows = SHAPE.num_layers * self.num_requests
        entries = torch.arange(num_rows * WINDOW, device="cuda").view(num_rows, WINDOW)
        at = torch.arange(TAIL - WINDOW, TAIL, device="cuda").repeat(num_rows, 1)
        ring, lse = self.cache.queries.flatten(0, 1), self.cache.query_lse.flatten(0, 1)
        return TailQueries(ring, lse, entries, at)

    def compactions(self, turn: int) -> tuple[Compaction, ...]:
        """Each request once, not its first time: K slots carry state and E are new."""
        tables = [tuple(table) for table in self.tables.tolist()]
        return tuple(
            Compaction(
                ident=turn * self.num_requests + row,
                row=row,
                policy="zipage",
                protected_len=0,
                tail_len=TAIL,
                num_keep=KV_BUDGET,
                stateful_len=KV_BUDGET,
                logical_len=FIRST_LOGICAL_LEN + turn * EVICT_INTERVAL,
                query_slot=row,
                num_queries=WINDOW,
                seed=row,
                block_ids_before=table,
                block_ids=table[: KV_BUDGET // self.block_size],
                block_copies=(),
            )
            for row, table in enumerate(tables)
        )


def kernel_cases(world: World) -> list[Case]:
    kv, slots, queries = world.cache.kv.flatten(0, 1), world.slots(), world.queries()
    num_rows = len(slots)
    shape = (num_rows, SHAPE.num_kv_heads, TAIL)
    positions = torch.arange(TAIL, dtype=torch.int32, device="cuda").expand(shape).contiguous()
    lens = torch.full((num_rows,), TAIL, device="cuda")
    num_keep = torch.full((num_rows,), KV_BUDGET, device="cuda")
    mass, similarity = torch.rand(shape, device="cuda"), torch.rand(shape, device="cuda")
    keep = select.select_top_k(mass, positions, lens, num_keep)
    num_moved = int(keep[..., KV_BUDGET:].sum())
    in_order = torch.zeros(num_rows, dtype=torch.bool, device="cuda")
    pools = (kv, world.cache.score.flatten(0, 1), world.cache.position.flatten(0, 1))
    settings = {"decay": 0.8, "pool_kernel": 5, "temperature": 0.4, "mass_weight": 0.2}
    numbers, tail = mass.numel(), (kv, slots, positions)
    key_bytes = numbers * (SHAPE.head_dim * 2 + 4) + slots.nbytes
    state_bytes = num_rows * SHAPE.num_kv_heads * KV_BUDGET * 16 + numbers
    partial = functools.partial
    return [
        Case(
            "mass_and_similarity",
            partial(scores.mass_and_similarity, *tail, queries, SCALE, CHUNK, THRESHOLD),
            key_bytes + 8 * numbers,
        ),
        Case(
            "attention_mass",
            partial(scores.attention_mass, *tail, queries, SCALE),
            key_bytes + 4 * numbers,
        ),
        Case(
            "lightning_similarity",
            partial(scores.lightning_similarity, *tail, CHUNK, THRESHOLD),
            key_bytes + 4 * numbers,
        ),
        Case(
            "flash_similarity",
            partial(scores.flash_similarity, *tail, THRESHOLD),
            key_bytes + 4 * numbers,
        ),
        Case(
            "combine_scores",
            partial(scores.combine_scores, mass, similarity, mass, lens, in_order, **settings),
            20 * numbers,
        ),
        Case(
            "protect_slots",
            partial(select.protect_slots, mass, positions, lens, lens, WINDOW, 0),
            12 * numbers,
        ),
        Case(
            "select_top_k",
            partial(select.select_top_k, mass, positions, lens, num_keep),
            9 * numbers,
        ),
        Case(
            "fill_holes",
            partial(compact.fill_holes, *pools, slots, keep, num_keep, positions, mass),
            num_moved * SHAPE.head_dim * 2 * 4 + state_bytes,
        ),
    ]


def compaction_us(world: World) -> tuple[float, float]:
    """Median microseconds of a whole compaction: on the device, and until the host may go on."""
    compressor = KVCompressor(world.cache, CompactionKernels(), {"zipage": Zipage()})
    device_us, host_us = [], []
    for turn in range(NUM_COMPACTIONS):
        items = world.compactions(turn)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        start.record()
        compressor.run(items)
        end.record()
        host_us.append((time.perf_counter() - begin) * 1e6)
        end.synchronize()
        device_us.append(start.elapsed_time(end) * 1e3)
    return statistics.median(device_us[3:]), statistics.median(host_us[3:])


def measure(num_requests: int, block_size: int) -> dict[str, dict[str, float]]:
    world, found = World(num_requests, block_size), {}
    print(f"{num_requests} requests, block size {block_size}")
    cases = kernel_cases(world)
    for case in cases:
        found[case.name] = measure_case(case)
    device_us, host_us = compaction_us(world)
    found["compaction"] = {"us": round(device_us, 1), "host_us": round(host_us, 1)}
    print(f"  {'whole compaction':22} {device_us:10.1f} us, host {host_us:.1f} us")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64])
    chosen = parser.parse_args()
    torch.manual_seed(0)
    results = {
        f"{num_requests} requests, block {block_size}": measure(num_requests, block_size)
        for num_requests in chosen.requests
        for block_size in chosen.block_sizes
    }
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"card": torch.cuda.get_device_name(), **versions, "results": results}))


if __name__ == "__main__":
    main()
