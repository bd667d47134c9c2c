"""What a compaction costs under each policy, at Qwen3-8B shapes: beside that of `zipage`.

    python benchmarks/card/policy_cost.py                  # all policies, 1 and 8 requests
    python benchmarks/card/policy_cost.py --policies zipage zipage2 tiers:novelty_share=0

A compaction keeps 2,048 of 2,304 slots in 36 layers. Timed on the device, and apart until the host
may go on; each figure is a median, `zipage` is timed before and after the others.
Prints a table, then one JSON line. Knows nothing of the engine.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from kernels_b import SHAPE, CompactionKernels, World

from zipage_lang.kernels import ranges, scores
from zipage_lang.kernels.backend import Forecast
from zipage_lang.kernels.reference import scores as reference_scores
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.policy import Calibration, QueryStats
from zipage_lang.runtime.policies.registry import Policies, load_policies

BLOCK_SIZE, NUM_TIMED, NUM_WARM = 16, 9, 3


class AllKernels(CompactionKernels):
    """As much of a backend as any policy calls."""

    gather_keys = staticmethod(reference_scores.gather_keys)
    gather_values = staticmethod(reference_scores.gather_values)
    attention_mass = staticmethod(scores.attention_mass)
    flash_similarity = staticmethod(scores.flash_similarity)
    value_range = staticmethod(ranges.value_range)


def random_calibration() -> Calibration:
    heads = (SHAPE.num_layers, SHAPE.num_kv_heads)
    forecast = Forecast(
        torch.randn(*heads, SHAPE.head_dim, device="cuda"),
        torch.randn(*heads, SHAPE.head_dim, device="cuda"),
        torch.randn(heads, device="cuda"),
        torch.rand(SHAPE.head_dim // 2, device="cuda"),
    )
    return Calibration(random_stats(), forecast)


def random_stats() -> QueryStats:
    sizes = (SHAPE.num_layers, SHAPE.num_q_heads)
    return QueryStats(
        torch.randn(*sizes, SHAPE.head_dim, device="cuda"),
        torch.rand(*sizes, SHAPE.head_dim // 2, device="cuda") + 1,
        torch.rand(SHAPE.head_dim // 2, device="cuda"),
    )


class Stopwatch:
    """Times compactions of one world, turn after turn."""

    def __init__(self, num_requests: int, policies: Policies) -> None:
        self._world, self._turn = World(num_requests, BLOCK_SIZE), 0
        calibration = random_calibration()
        self._compressor = KVCompressor(
            self._world.cache, AllKernels(), policies, calibration_of=lambda _: calibration
        )

    def medians_us(self, asked: str) -> tuple[float, float]:
        """On the device, and until the host may go on."""
        times = [self._run(asked) for _ in range(NUM_WARM + NUM_TIMED)][NUM_WARM:]
        device_us, host_us = zip(*times, strict=True)
        return statistics.median(device_us), statistics.median(host_us)

    def _run(self, asked: str) -> tuple[float, float]:
        items = tuple(
            dataclasses.replace(item, policy=asked) for item in self._world.compactions(self._turn)
        )
        self._turn += 1
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start.record()
        self._compressor.run(items)
        end.record()
        host_us = (time.perf_counter() - begin) * 1e6
        end.synchronize()
        return start.elapsed_time(end) * 1e3, host_us


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--policies", nargs="+", default=[])
    options = parser.parse_args()
    torch.manual_seed(0)
    policies = load_policies()
    names = options.policies or [name for name in policies if name not in ("full", "zipage")]
    lines = []
    for num_requests in options.requests:
        watch = Stopwatch(num_requests, policies)
        print(f"{num_requests} requests: device us, host us, share of zipage's device time")
        base = watch.medians_us("zipage")
        for asked in [*names, "zipage"]:
            device_us, host_us = watch.medians_us(asked)
            ratio = device_us / base[0]
            print(f"  {asked:40} {device_us:9.0f} {host_us:9.0f} {ratio:7.2f}", flush=True)
            lines.append([num_requests, asked, round(device_us), round(host_us), round(ratio, 3)])
        del watch
        torch.cuda.empty_cache()
    print(json.dumps({"policy_cost": lines, "device": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
