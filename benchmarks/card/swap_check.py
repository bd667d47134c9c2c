"""Host swap on a card: right to the bit, how fast each way, and what it costs decoding beside it.

    source benchmarks/card/setup.sh && python3 benchmarks/card/swap_check.py

The pools have Qwen3-8B's shape. Decode stands for itself as a CUDA graph that reads 12 GiB, the
kind of work a step is. Prints a table and one JSON line. Knows nothing of requests.
"""

import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Captured, capture

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.host_swap import StagedHostSwap, make_host_swap
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.step_plan import BlockSwap

NUM_BLOCKS = 2_000
NUM_HOST_BLOCKS = 1_200
REQUEST_BLOCKS = 165  # K + E + a prompt of 300 tokens, 390 MB
NUM_STEPS = 40


def make_cache(device: torch.device, num_blocks: int, num_layers: int, block_size: int) -> KVCache:
    shape = KVShape(
        num_layers=num_layers, num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    return KVCache(
        shape,
        num_blocks=num_blocks,
        block_size=block_size,
        num_query_slots=1,
        window=16,
        device=device,
    )


def poison(cache: KVCache, seed: int) -> None:
    """Random bits, NaN patterns among them, in every pool."""
    generator = torch.Generator(cache.kv.device).manual_seed(seed)
    for pool in cache.block_pools:
        bits = pool.view(torch.int16)
        for layer in bits:
            layer.copy_(
                torch.randint(-(2**15), 2**15, layer.shape, generator=generator, device=bits.device)
            )


def as_bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.int16)


def check(num_layers: int, block_size: int, seed: int) -> bool:
    """Random swaps with reuse of blocks and host lines at once; what comes back must be equal."""
    draw = random.Random(seed)
    backend = choose_backend("cuda", torch.bfloat16)
    cache = make_cache(backend.device, 61, num_layers, block_size)
    poison(cache, seed)
    swap = make_host_swap(cache, 50, backend)
    kept: dict[int, list[torch.Tensor]] = {}
    is_right = True
    for turn in range(30):
        free = [host_id for host_id in range(50) if host_id not in kept]
        host_ids = draw.sample(free, draw.randint(0, len(free)))
        block_ids = draw.sample(range(61), len(host_ids))
        for block_id, host_id in zip(block_ids, host_ids, strict=True):
            kept[host_id] = [as_bits(pool)[:, block_id].clone() for pool in cache.block_pools]
        swap.swap_out([BlockSwap(*pair) for pair in zip(block_ids, host_ids, strict=True)])
        for pool in cache.block_pools:
            as_bits(pool)[:, block_ids] = -turn  # with no wait: the swap must have read by then
        back = draw.sample(sorted(kept), draw.randint(0, len(kept)))
        block_ids = draw.sample(range(61), len(back))
        swap.swap_in([BlockSwap(*pair) for pair in zip(block_ids, back, strict=True)])
        for block_id, host_id in zip(block_ids, back, strict=True):
            for pool, wanted in zip(cache.block_pools, kept.pop(host_id), strict=True):
                is_right &= bool(torch.equal(as_bits(pool)[:, block_id], wanted))
    return is_right


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def swaps_of(request: int, *, is_scattered: bool) -> list[BlockSwap]:
    draw = random.Random(request)
    block_ids = draw.sample(range(1, NUM_BLOCKS), REQUEST_BLOCKS)
    first = request * REQUEST_BLOCKS
    host_ids = list(range(first, first + REQUEST_BLOCKS))
    if is_scattered:  # every other line: no two of them are neighbours
        host_ids = list(range(0, 2 * REQUEST_BLOCKS, 2))
    return [BlockSwap(*pair) for pair in zip(block_ids, host_ids, strict=True)]


def time_ways(swap: StagedHostSwap, line_bytes: int) -> dict[str, float]:
    """GB/s each way of one request's blocks, and the host's time to enqueue them."""
    found: dict[str, float] = {}
    found["first_out_ms"] = 1e3 * seconds(
        lambda: swap.swap_out(swaps_of(0, is_scattered=False))
    )  # pins memory, compiles
    for name, is_scattered in (("", False), ("scattered_", True)):
        request = swaps_of(0, is_scattered=is_scattered)
        for way, move in (("out", swap.swap_out), ("in", swap.swap_in)):
            move(request)
            total = min(seconds(lambda move=move, request=request: move(request)) for _ in range(5))
            started = time.perf_counter()
            move(request)
            found[f"{name}{way}_enqueue_ms"] = 1e3 * (time.perf_counter() - started)
            found[f"{name}{way}_gb_s"] = REQUEST_BLOCKS * line_bytes / total / 1e9
    return found


def decode_stand_in(device: torch.device) -> Captured:
    weights = torch.ones(6 * 2**30, dtype=torch.bfloat16, device=device).view(96, -1)
    sums = torch.zeros(96, dtype=torch.float32, device=device)

    def read_all() -> None:
        for index in range(96):
            sums[index] = weights[index].sum(dtype=torch.float32)

    return capture(read_all)


def run_steps(graph: Captured, act: Callable[[int], None]) -> list[float]:
    """Milliseconds between the ends of steps, one step launched ahead as the engine does."""
    ends = []
    for step in range(NUM_STEPS):
        act(step)
        graph.replay()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        ends.append(end)
        if step > 0:
            ends[-2].synchronize()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(ends)]


def time_beside_decoding(swap: StagedHostSwap, device: torch.device) -> dict[str, float]:
    """Steps with a request out, in, or both at every 4th, against steps with none."""
    graph = decode_stand_in(device)
    one, two = (swaps_of(request, is_scattered=False) for request in (0, 1))
    swap.swap_out(one)
    swap.swap_out(two)

    def every_fourth(*moves: tuple[Callable[..., None], list[BlockSwap]]) -> Callable[[int], None]:
        def act(step: int) -> None:
            if step % 4 == 1:
                for move, swaps in moves:
                    move(swaps)

        return act

    plain = run_steps(graph, lambda step: None)
    plain = run_steps(graph, lambda step: None)
    base = sum(plain) / len(plain)
    found = {"step_ms": base}
    ways = {
        "out": every_fourth((swap.swap_out, one)),
        "in": every_fourth((swap.swap_in, one)),
        "both": every_fourth((swap.swap_out, one), (swap.swap_in, two)),
    }
    for name, act in ways.items():
        times = run_steps(graph, act)
        found[f"{name}_added_ms_per_swap"] = 4 * (sum(times) / len(times) - base)
        found[f"{name}_worst_step_ms"] = max(times)
    return found


def main() -> None:
    shapes = [(36, 16), (3, 1), (1, 128), (2, 16)]
    results = {f"{layers}x{size}": check(layers, size, layers) for layers, size in shapes}
    print("right:", results)
    backend = choose_backend("cuda", torch.bfloat16)
    cache = make_cache(backend.device, NUM_BLOCKS, 36, 16)
    line_bytes = sum(pool[:, 0].nbytes for pool in cache.block_pools)
    swap = make_host_swap(cache, NUM_HOST_BLOCKS, backend)
    assert isinstance(swap, StagedHostSwap)
    found = {**time_ways(swap, line_bytes), **time_beside_decoding(swap, backend.device)}
    found["host_gib"] = swap.host_bytes / 2**30
    for name, value in found.items():
        print(f"{name:28} {value:10.2f}")
    rounded = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps({"check": "swap", "right": all(results.values()), **rounded}))


main()
