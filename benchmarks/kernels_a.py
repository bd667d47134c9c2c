"""Times the store, fused and sampling kernels at Qwen3-8B decode shapes: `python kernels_a.py`.

Each kernel is captured many times in one CUDA graph, so launch cost is what a captured decode step
pays. Inputs of a few MB stay in L2 between calls, as they do between the layers of a real step: a
share above 100% means just that. Prints a table, then one JSON line.
Knows nothing of the engine.
"""

import json

import torch
import triton
from kernel_timing import Case, measure
from torch import Tensor

from zipage_lang.kernels import fused_ops, kv_store, sampling
from zipage_lang.kernels.backend import RowSettings

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 4096, 12288, 151_936
BATCH, BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 128, 16, 4096, 36
CALLS_PER_GRAPH, NUM_REPLAYS = 20, 25
QKV_SIZE = (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def distinct(num: int, limit: int) -> Tensor:
    return torch.randperm(limit, device="cuda")[:num].contiguous()


def store_cases() -> list[Case]:
    pool = normal(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    k, v = normal(BATCH, NUM_KV_HEADS, HEAD_DIM), normal(BATCH, NUM_KV_HEADS, HEAD_DIM)
    slots = distinct(BATCH, NUM_BLOCKS * BLOCK_SIZE)
    ring_lse = torch.zeros(NUM_LAYERS, BATCH * 16, NUM_Q_HEADS, device="cuda")
    lse = torch.zeros(NUM_LAYERS, BATCH, NUM_Q_HEADS, device="cuda")
    entries = distinct(BATCH, BATCH * 16)
    pools = normal(NUM_LAYERS, 256, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    order = distinct(256, 256)
    src, dst = order[:64].contiguous(), order[64:128].contiguous()
    kv_bytes = 2 * k.nbytes
    return [
        Case("store_kv", lambda: kv_store.store_kv(pool, slots, k, v), 2 * kv_bytes),
        Case(
            "store_lse (36 layers)",
            lambda: kv_store.store_lse(ring_lse, entries, lse),
            2 * lse.nbytes,
        ),
        Case(
            "copy_blocks (64 blocks, 36 layers)",
            lambda: kv_store.copy_blocks([pools], src, dst),
            pools.nbytes // 256 * 64 * 2,
        ),
    ]


def fused_cases() -> list[Case]:
    x, residual, weight = (
        normal(BATCH, HIDDEN_SIZE),
        normal(BATCH, HIDDEN_SIZE),
        normal(HIDDEN_SIZE),
    )
    gate_up, head_weight = normal(BATCH, 2 * INTERMEDIATE_SIZE), normal(HEAD_DIM)
    qkv = normal(BATCH, QKV_SIZE)
    heads = qkv.view(BATCH, -1, HEAD_DIM)
    q, k = heads[:, :NUM_Q_HEADS], heads[:, NUM_Q_HEADS:-NUM_KV_HEADS]
    cos, sin = normal(BATCH, HEAD_DIM // 2), normal(BATCH, HEAD_DIM // 2)
    pool = normal(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    slots = distinct(BATCH, NUM_BLOCKS * BLOCK_SIZE)
    ring, entries = normal(BATCH * 16, NUM_Q_HEADS, HEAD_DIM), distinct(BATCH, BATCH * 16)
    angles, qk_bytes = (cos, sin), (q.numel() + k.numel()) * 2
    return [
        Case("rms_norm", lambda: fused_ops.rms_norm(x, weight, 1e-6), 2 * x.nbytes),
        Case(
            "add_rms_norm",
            lambda: fused_ops.add_rms_norm(x, residual, weight, 1e-6),
            4 * x.nbytes,
        ),
        Case("silu_mul", lambda: fused_ops.silu_mul(gate_up), gate_up.nbytes * 3 // 2),
        Case("rope", lambda: fused_ops.rope(q, k, *angles), 2 * qk_bytes),
        Case(
            "qk_norm_rope_store",
            lambda: fused_ops.qk_norm_rope_store(
                qkv, head_weight, head_weight, 1e-6, *angles, pool, slots
            ),
            2 * qkv.nbytes,
        ),
        Case(
            "qk_norm_rope_store, queries kept",
            lambda: fused_ops.qk_norm_rope_store(
                qkv, head_weight, head_weight, 1e-6, *angles, pool, slots, ring, entries
            ),
            2 * qkv.nbytes + q.numel() * 2,
        ),
    ]


def row_settings(*, temperature: float, top_k: int, top_p: float) -> RowSettings:
    ones = torch.ones(BATCH, dtype=torch.float64, device="cuda")
    numbers = torch.arange(BATCH, device="cuda")
    return RowSettings(
        seeds=numbers,
        num_generated=numbers.clone(),
        temperature=ones * temperature,
        top_k=torch.full_like(numbers, top_k),
        top_p=ones * top_p,
        min_p=ones * 0,
        last_token_ids=torch.zeros_like(numbers),
    )


def sampling_cases() -> list[Case]:
    wide = normal(BATCH, VOCAB_SIZE).float() * 3
    half = wide.bfloat16()
    rows = torch.arange(BATCH, device="cuda")
    greedy = row_settings(temperature=0.0, top_k=VOCAB_SIZE, top_p=1.0)
    plain = row_settings(temperature=0.7, top_k=VOCAB_SIZE, top_p=1.0)
    nucleus = row_settings(temperature=0.6, top_k=VOCAB_SIZE, top_p=0.95)
    both = row_settings(temperature=0.6, top_k=20, top_p=0.95)
    seen = torch.zeros(BATCH, VOCAB_SIZE, dtype=torch.bool, device="cuda")
    counts = torch.zeros(BATCH, VOCAB_SIZE, dtype=torch.int32, device="cuda")
    neutral = [plain.top_p, plain.min_p, plain.min_p]
    draw = sampling.draw_rows
    return [
        Case("random_uniform", lambda: sampling.random_uniform(rows, rows), 24 * BATCH),
        Case("draw_rows greedy fp32", lambda: draw(wide, rows, greedy, 0), wide.nbytes),
        Case("draw_rows plain fp32", lambda: draw(wide, rows, plain, 0), wide.nbytes),
        Case("draw_rows plain bf16", lambda: draw(half, rows, plain, 0), half.nbytes),
        Case("draw_rows top_p fp32", lambda: draw(wide, rows, nucleus, 1), 2 * wide.nbytes),
        Case("draw_rows top_k top_p fp32", lambda: draw(wide, rows, both, 1), 2 * wide.nbytes),
        Case(
            "penalize",
            lambda: sampling.penalize(wide, seen, counts, *neutral),
            2 * wide.nbytes + seen.nbytes + counts.nbytes,
        ),
        Case("score_tokens top 0", lambda: sampling.score_tokens(wide, rows, 0), wide.nbytes),
        Case("score_tokens top 5", lambda: sampling.score_tokens(wide, rows, 5), wide.nbytes),
    ]


def main() -> None:
    torch.manual_seed(0)
    results = {}
    for make_cases in (store_cases, fused_cases, sampling_cases):
        for case in make_cases():
            results[case.name] = measure(case, CALLS_PER_GRAPH, NUM_REPLAYS)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    card = torch.cuda.get_device_name()
    print(json.dumps({"card": card, **versions, "batch": BATCH, "kernels": results}))


if __name__ == "__main__":
    main()
