"""Decode steps of a published shape with random weights: eager, as a CUDA graph, and its parts.

Knows nothing of the scheduler; batches are made by hand.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from timing import Captured, capture, event_ms, host_us
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch, choose_backend
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.runtime.engine_parts import kv_shape
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.models.registry import load_dummy_model

BLOCK_SIZE = 16


class DecodeModel:
    """A model, and a pool with room for so many decodes of that many slots; in bfloat16."""

    def __init__(self, name: str, num_rows: int, kv_len: int) -> None:
        self.backend = choose_backend("cuda", torch.bfloat16)
        loaded = load_dummy_model(name, torch.bfloat16, self.backend, None)
        self.model, self.arch = loaded.model, loaded.arch
        arch = self.arch
        self.heads = Heads(arch.num_q_heads, arch.num_kv_heads, arch.head_dim, BLOCK_SIZE)
        self.num_blocks = num_rows * -(-kv_len // BLOCK_SIZE)
        self.cache = KVCache(
            kv_shape(loaded, torch.bfloat16),
            num_blocks=1 + self.num_blocks,
            block_size=BLOCK_SIZE,
            num_query_slots=1,
            window=1,
            device=self.backend.device,
        )
        for layer_kv in self.cache.kv:
            layer_kv.normal_()

    def floor_ms(self, num_rows: int, kv_len: int, bytes_per_s: float) -> float:
        """What it takes to read all weights and the resident KV once."""
        arch = self.arch
        num_bytes = arch.num_layers * layer_bytes(arch) + 2 * arch.vocab_size * arch.hidden_size
        slot_bytes = arch.num_layers * arch.num_kv_heads * arch.head_dim * 4
        return (num_bytes + num_rows * kv_len * slot_bytes) / bytes_per_s * 1e3

    def run(self, batch: ForwardBatch) -> Tensor:
        """Greedy tokens, int64 [num_rows]."""
        return self.model.logits(self.model.forward(batch, self.cache)).argmax(-1)


class DecodeStep:
    """One batch of a model: every row with as many slots, in blocks all over the pool."""

    def __init__(self, model: DecodeModel, num_rows: int, kv_len: int) -> None:
        self.model, self.num_rows, self.kv_len = model, num_rows, kv_len
        blocks_each = -(-kv_len // BLOCK_SIZE)
        order = torch.randperm(model.num_blocks)[: num_rows * blocks_each].int() + 1
        tables = order.view(num_rows, blocks_each)  # [num_rows, blocks_each]
        self.attention_batch = AttentionBatch(
            torch.arange(num_rows + 1, dtype=torch.int32),
            torch.full((num_rows,), kv_len, dtype=torch.int32),
            tables,
        )
        device = model.backend.device
        self._slots = tables[:, -1].long() * BLOCK_SIZE + (kv_len - 1) % BLOCK_SIZE
        self._slots = self._slots.to(device)
        self._token_ids = torch.randint(model.arch.vocab_size, (num_rows,), device=device)
        self._graphs = model.backend.graph_planner(
            *model.heads, max_rows=num_rows, max_blocks=blocks_each
        )

    def eager_batch(self) -> ForwardBatch:
        heads = self.model.heads
        return self._batch(self.model.backend.plan_attention(self.attention_batch, *heads))

    def captured(self) -> tuple[Captured, list[Tensor]]:
        """The step as the engine would replay it, and its tokens (a list of one tensor)."""
        assert self._graphs is not None
        batch = self._batch(self._graphs.plan(self.attention_batch, self.num_rows))
        drawn: list[Tensor] = [self._token_ids]

        def work() -> None:
            drawn[0] = self.model.run(batch)

        return capture(work), drawn

    def _batch(self, plan: Any) -> ForwardBatch:
        device = self.model.backend.device
        return ForwardBatch(
            token_ids=self._token_ids,
            positions=torch.full((self.num_rows,), self.kv_len - 1, device=device),
            slots=self._slots,
            attention_plan=plan,
            ring_slots=None,
            wanted=None,
            logits_index=torch.arange(self.num_rows, device=device),
        )


def time_model(
    report: dict[str, Any],
    copy_bytes_per_s: float,
    name: str = "qwen3-8b",
    num_rows: int = 128,
    kv_len: int = 2304,
) -> None:
    started = time.perf_counter()
    model = DecodeModel(name, num_rows, kv_len)
    step = DecodeStep(model, num_rows, kv_len)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - started
    with torch.inference_mode():
        eager_batch = step.eager_batch()
        eager_tokens = model.run(eager_batch)
        eager_ms = event_ms(lambda: model.run(eager_batch), repeats=5)
        launch_us = host_us(lambda: model.run(eager_batch), repeats=5)
        graph, drawn = step.captured()
        graph_ms = event_ms(graph.replay)
        equal = bool(torch.equal(drawn[0], eager_tokens))
        floor_ms = model.floor_ms(num_rows, kv_len, copy_bytes_per_s)
        print(
            f"{name} {num_rows}x{kv_len}: load {load_s:.1f} s, eager {eager_ms:.2f} ms (host "
            f"{launch_us / 1e3:.1f}), graph {graph_ms:.2f} ms = {graph_ms / floor_ms:.3f} of the "
            f"floor {floor_ms:.2f} ms; same tokens: {equal}"
        )
        report[f"model {name} {num_rows}x{kv_len}"] = {
            "load_s": load_s,
            "eager_ms": eager_ms,
            "eager_host_ms": launch_us / 1e3,
            "graph_ms": graph_ms,
            "floor_ms": floor_ms,
            "same_tokens": equal,
            "different_tokens": len(eager_tokens.unique()),
            "kernels": profile(graph.replay),
        }


def layer_bytes(arch: Any) -> int:
    """bfloat16 bytes of one layer's matrices."""
    q_size, kv_size = arch.num_q_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    sizes = arch.hidden_size * (2 * q_size + 2 * kv_size + 3 * arch.intermediate_size)
    return 2 * sizes


def profile(work: Callable[[], object]) -> list[tuple[str, float, int]]:
    """Device time by kernel: name, milliseconds per call of `work`, launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    rows = [
        (event.key[:90], round(event.device_time_total / 1e3, 3), event.count)
        for event in profiler.key_averages()
        if event.device_time_total > 0
    ]
    rows.sort(key=lambda row: -row[1])
    for name, ms, count in rows[:14]:
        print(f"  {ms:8.3f} ms {count:5d} x {name}")
    return rows[:40]
