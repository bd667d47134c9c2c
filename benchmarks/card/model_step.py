"""One decode step of a published shape with random weights: eager, as a CUDA graph, and its parts.

Knows nothing of the scheduler; the batch is made by hand.
"""

import time
from typing import Any

import torch
from timing import capture, event_ms, host_us

from zipage_lang.kernels.backend import AttentionBatch, choose_backend
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.models.registry import load_dummy_model

BLOCK_SIZE = 16


def time_model(
    report: dict[str, Any],
    copy_bytes_per_s: float,
    name: str = "qwen3-8b",
    num_rows: int = 128,
    kv_len: int = 2304,
) -> None:
    dtype = torch.bfloat16
    started = time.perf_counter()
    backend = choose_backend("cuda", dtype)
    loaded = load_dummy_model(name, dtype, backend, None)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - started
    arch, device = loaded.arch, backend.device
    heads = Heads(arch.num_q_heads, arch.num_kv_heads, arch.head_dim, BLOCK_SIZE)
    blocks_each = -(-kv_len // BLOCK_SIZE)
    shape = KVShape(
        num_layers=arch.num_layers,
        num_q_heads=arch.num_q_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        dtype=dtype,
    )
    cache = KVCache(
        shape,
        num_blocks=1 + num_rows * blocks_each,
        block_size=BLOCK_SIZE,
        num_query_slots=1,
        window=1,
        device=device,
    )
    for layer_kv in cache.kv:
        layer_kv.normal_()
    order = torch.randperm(num_rows * blocks_each).int() + 1
    tables = order.view(num_rows, blocks_each)  # [num_rows, blocks_each]
    attention_batch = AttentionBatch(
        torch.arange(num_rows + 1, dtype=torch.int32),
        torch.full((num_rows,), kv_len, dtype=torch.int32),
        tables,
    )
    last_slots = tables[:, -1].long() * BLOCK_SIZE + (kv_len - 1) % BLOCK_SIZE
    graphs = backend.graph_planner(
        arch.num_q_heads,
        arch.num_kv_heads,
        arch.head_dim,
        BLOCK_SIZE,
        max_rows=num_rows,
        max_blocks=blocks_each,
    )

    def batch_of(plan: Any) -> ForwardBatch:
        return ForwardBatch(
            token_ids=torch.randint(arch.vocab_size, (num_rows,), device=device),
            positions=torch.full((num_rows,), kv_len - 1, device=device),
            slots=last_slots.to(device),
            attention_plan=plan,
            ring_slots=None,
            logits_index=torch.arange(num_rows, device=device),
        )

    def run(batch: ForwardBatch) -> torch.Tensor:
        hidden = loaded.model.forward(batch, cache)
        return loaded.model.logits(hidden).argmax(-1)

    with torch.inference_mode():
        eager_batch = batch_of(backend.plan_attention(attention_batch, *heads))
        eager_tokens = run(eager_batch)
        eager_ms = event_ms(lambda: run(eager_batch), repeats=5)
        launch_us = host_us(lambda: run(eager_batch), repeats=5)
        graph_batch = batch_of(graphs.plan(attention_batch, num_rows))
        graph_batch.token_ids.copy_(eager_batch.token_ids)
        drawn: list[Any] = [None]

        def work() -> None:
            drawn[0] = run(graph_batch)

        graph = capture(work)
        graph_ms = event_ms(graph.replay)
        equal = bool(torch.equal(drawn[0], eager_tokens))
        weight_bytes = sum(layer_bytes(arch) for _ in range(arch.num_layers))
        weight_bytes += 2 * arch.vocab_size * arch.hidden_size
        kv_bytes = num_rows * kv_len * arch.num_layers * arch.num_kv_heads * arch.head_dim * 4
        floor_ms = (weight_bytes + kv_bytes) / copy_bytes_per_s * 1e3
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


def profile(work: Any) -> list[tuple[str, float, int]]:
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
