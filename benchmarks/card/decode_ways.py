"""Decode attention and the product behind it by rows: our kernel, and FlashInfer's in its ways.

    python3 benchmarks/card/decode_ways.py [slots a row ...]

Device time a layer of attention and output projection, in one graph of all layers, for 1 to 192
rows of equal length: our kernel; FlashInfer's padded launch, which splits (few rows), and the whole
one, which lets the product start when it ends or as soon as it has begun (`RELEASING_PAIRS`). What
`kernels/whole_rows.py` and `kernels/flashinfer_module.py` go by was measured so. The floor reads
keys, values and weight once. Qwen3-8B shapes. Knows nothing of the engine.
"""

import sys
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from decode_step import copy_rate
from timing import capture, event_ms

from zipage_lang.kernels import flashinfer_module
from zipage_lang.kernels.attention import AttentionPart, AttentionPlan, FlashInferAttention
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import Heads, Splits
from zipage_lang.kernels.hopper.attention import DecodePart
from zipage_lang.kernels.hopper.linear import HopperLinear
from zipage_lang.kernels.host_rows import HostRows
from zipage_lang.kernels.plan_buffers import PlanBuffers

DEVICE = torch.device("cuda", 0)
HEADS, HIDDEN, NUM_LAYERS, SCALE = Heads(32, 8, 128, 16), 4096, 24, 0.09
SLOT_BYTES = 4 * HEADS.num_kv_heads * HEADS.head_dim
LARGEST_POOL = 128 * 2304  # slots
ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 33, 34, 36, 40, 44, 48, 56, 64, 68, 72, 80, 96, 100, 104)
ROWS += (112, 128, 144, 160, 176, 192)
MOST_SPLIT = 33  # with more rows FlashInfer splits none


class Way(NamedTuple):
    """How attention is launched."""

    splits: Splits | None  # None: by our kernel
    is_early: bool


WAYS = {
    "ours": Way(None, False),
    "split": Way(Splits.ALWAYS, False),
    "whole": Way(Splits.NEVER, False),
    "whole, early": Way(Splits.NEVER, True),
}


class Layers:
    """Pools and output projections of all layers."""

    def __init__(self) -> None:
        kind: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        self.num_blocks = LARGEST_POOL // HEADS.block_size
        shape = (1 + self.num_blocks, 2, HEADS.block_size, HEADS.num_kv_heads, HEADS.head_dim)
        self.pools = [torch.empty(shape, **kind).normal_() for _ in range(NUM_LAYERS)]
        size = HEADS.num_q_heads * HEADS.head_dim
        self.products = [
            HopperLinear(torch.randn(HIDDEN, size, **kind), None, False) for _ in range(NUM_LAYERS)
        ]
        self.kernels = FlashInferAttention(DEVICE, torch.bfloat16)

    def rows(self, num_rows: int, kv_len: int) -> HostRows:
        """Decodes in blocks all over the pool."""
        blocks_each = -(-kv_len // HEADS.block_size)
        order = torch.randperm(self.num_blocks)[: num_rows * blocks_each].int() + 1
        lens = torch.full((num_rows,), kv_len, dtype=torch.int32)
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        return HostRows.of(AttentionBatch(starts, lens, order.view(num_rows, blocks_each)))


class OneWay:
    """One way over all layers as a graph."""

    def __init__(self, layers: Layers, rows: HostRows, way: Way) -> None:
        self._buffers = PlanBuffers(DEVICE)
        self._plan = AttentionPlan((self._part(layers.kernels, rows, way),))
        q_shape = (rows.num_seqs, HEADS.num_q_heads, HEADS.head_dim)
        self._q = torch.randn(q_shape, device=DEVICE, dtype=torch.bfloat16)
        stream_shape = (rows.num_seqs, HIDDEN)
        self._residual = torch.randn(stream_shape, device=DEVICE, dtype=torch.bfloat16)
        flashinfer_module.RELEASING_PAIRS = range(10**6 if way.is_early else 0)
        self.graph = capture(lambda: self._run(layers), warmups=1)

    def _part(
        self, kernels: FlashInferAttention, rows: HostRows, way: Way
    ) -> AttentionPart | DecodePart:
        if way.splits is not None:
            return kernels.plan_part(rows, HEADS, self._buffers, way.splits)
        hopper = kernels.hopper_for(HEADS)
        assert hopper is not None, "this card has no Hopper kernels"
        return hopper.plan(rows, HEADS, self._buffers)

    def _run(self, layers: Layers) -> None:
        for pool, product in zip(layers.pools, layers.products, strict=True):
            out, _ = layers.kernels.attention(self._q, pool, self._plan, SCALE, need_lse=False)
            product.add(out.flatten(1), self._residual)


def measure(layers: Layers, num_rows: int, kv_len: int) -> dict[str, float]:
    """Microseconds a layer, by way."""
    rows = layers.rows(num_rows, kv_len)
    captured = {
        name: OneWay(layers, rows, way)
        for name, way in WAYS.items()
        if num_rows <= MOST_SPLIT or way.splits is not Splits.ALWAYS
    }
    times = defaultdict(list)
    for _ in range(2):
        for name, one in captured.items():
            times[name].append(event_ms(one.graph.replay, 4, 1) * 1e3 / NUM_LAYERS)
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    lens = [int(word) for word in sys.argv[1:]] or [2304, 1390]
    copy, layers = copy_rate(), Layers()
    print(f"copy {copy / 1e12:.3f} TB/s; us a layer")
    weight_bytes = 2 * HIDDEN * HEADS.num_q_heads * HEADS.head_dim
    with torch.inference_mode():
        for kv_len in lens:
            for num_rows in ROWS:
                if num_rows * kv_len > LARGEST_POOL:
                    break
                floor = (num_rows * kv_len * SLOT_BYTES + weight_bytes) / copy * 1e6
                found = measure(layers, num_rows, kv_len)
                line = "  ".join(f"{name} {us:6.1f}" for name, us in found.items())
                print(f"{num_rows:4d} rows of {kv_len}: floor {floor:6.1f}  {line}", flush=True)


main()
