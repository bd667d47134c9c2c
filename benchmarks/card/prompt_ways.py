"""FlashInfer's two kernels for prompts side by side, over numbers and lengths of sequences.

    python3 benchmarks/card/prompt_ways.py [head_dim]

What `kernels/prompt_choice.py` goes by was measured so. One table line for each batch: microseconds
of a layer of Qwen3-8B, the share of the bfloat16 rate, which one the rule takes. Ends in one JSON
line. Knows nothing of the engine.
"""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from timing import event_ms

from zipage_lang.kernels import attention
from zipage_lang.kernels.attention import AttentionPlan, FlashInferAttention, num_sms
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.prompt_attention import TILE_TOKENS
from zipage_lang.kernels.prompt_choice import is_for_hopper

MAX_TOKENS = 4096
Q_LENS = (8, 24, 48, 64, 96, 128, 160, 200, 256, 350, 512, 1024, 2048, 4096)
NUM_SEQS = (1, 2, 4, 8, 16, 32, 64)
HELD = (0, 256, 1024, 4096, 16384)  # slots before a sequence's own tokens
POOL_BLOCKS = 40_000
LAUNCHES = 8  # in a row, so that the host's way to each is hidden

Sequences = list[tuple[int, int]]  # tokens and slots of each


def batches() -> Iterator[tuple[str, Sequences]]:
    for num_seqs in NUM_SEQS:
        for q_len in Q_LENS:
            for held in HELD:
                if q_len * num_seqs <= MAX_TOKENS and num_seqs * (held + q_len) <= 400_000:
                    yield (
                        f"{num_seqs} x {q_len} of {held + q_len}",
                        [(q_len, q_len + held)] * num_seqs,
                    )
    rng = random.Random(7)
    for _ in range(4):
        lens = [rng.randrange(100, 1025) for _ in range(7)]
        yield "prompts of the load `short`", [(length, length) for length in lens]


def as_batch(seqs: Sequences, block_size: int) -> AttentionBatch:
    widths = [-(-kv_len // block_size) for _, kv_len in seqs]
    order = torch.randperm(POOL_BLOCKS - 1).int() + 1
    tables = torch.full((len(seqs), max(widths)), -1, dtype=torch.int32)
    start = 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[start : start + width]
        start += width
    starts = torch.tensor([0, *(q_len for q_len, _ in seqs)]).cumsum(0).int()
    return AttentionBatch(starts, torch.tensor([kv for _, kv in seqs], dtype=torch.int32), tables)


class Ways:
    """Both kernels over one pool."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.device = torch.device("cuda:0")
        shape = (POOL_BLOCKS, 2, heads.block_size, heads.num_kv_heads, heads.head_dim)
        self.layer_kv = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        self.kernels = FlashInferAttention(self.device, torch.bfloat16)

    def us(self, seqs: Sequences, takes_hopper: bool) -> float:
        attention.is_for_hopper = lambda *_: takes_hopper
        plan: AttentionPlan = self.kernels.plan_attention(as_batch(seqs, 16), *self.heads)
        num_tokens = sum(q_len for q_len, _ in seqs)
        shape = (num_tokens, self.heads.num_q_heads, self.heads.head_dim)
        q = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        scale = self.heads.head_dim**-0.5

        def work() -> None:
            for _ in range(LAUNCHES):
                self.kernels.attention(q, self.layer_kv, plan, scale, need_lse=False)

        return event_ms(work, repeats=5) * 1e3 / LAUNCHES

    def chosen(self, seqs: Sequences) -> bool:
        q_lens, kv_lens = torch.tensor(seqs, dtype=torch.int32).numpy().T
        tile = TILE_TOKENS[self.heads.head_dim]
        num_heads = self.heads.num_q_heads, self.heads.num_kv_heads
        return is_for_hopper(q_lens, kv_lens, *num_heads, tile, num_sms(self.device))


def main() -> None:
    head_dim = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    ways = Ways(Heads(32, 8, head_dim, 16))
    rows: list[dict[str, Any]] = []
    for name, seqs in batches():
        general, hopper = ways.us(seqs, False), ways.us(seqs, True)
        pairs = sum(q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2 for q_len, kv_len in seqs)
        rate = 4 * 32 * head_dim * pairs / min(general, hopper) / 1e6  # TFLOP/s
        takes = ways.chosen(seqs)
        is_right = takes == (hopper < general)
        rows.append({"batch": name, "general": general, "hopper": hopper, "takes_hopper": takes})
        verdict = "" if is_right else "  (the other is faster)"
        print(
            f"{name:28s} {general:8.1f} {hopper:8.1f} us  {general / hopper:5.2f}"
            f"  {rate:5.0f} TFLOP/s  {'hopper' if takes else 'general'}{verdict}"
        )
    lost = sum(row["hopper" if row["takes_hopper"] else "general"] for row in rows) / sum(
        min(row["general"], row["hopper"]) for row in rows
    )
    print(f"the rule's choices take {lost:.4f} times the best ones")
    print(json.dumps({"head_dim": head_dim, "lost": lost, "batches": rows}))


if __name__ == "__main__":
    main()
