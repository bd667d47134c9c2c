"""Decode attention with shared prefixes on the card: plain launch against grouped, each in a graph.

    python3 benchmarks/card/shared_prefix.py

Results are held against float64 first. GB/s counts, under "as if" the slots of every row, under
"read" what the launch has to read. Ends in one JSON line. Knows nothing of the engine.
"""

import json
from typing import Any, NamedTuple

import torch
from timing import capture, event_ms, host_us
from torch import Tensor

from zipage_lang.kernels.attention import AttentionPlan, FlashInferAttention
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.graph_decode import GraphDecode
from zipage_lang.kernels.grouped_launch import GroupedLayout
from zipage_lang.kernels.merge import merge_parts
from zipage_lang.kernels.shared_prefix import best_groups, shared_blocks, worthwhile_groups

DEVICE = torch.device("cuda", 0)
HEADS = Heads(32, 8, 128, 16)
SLOT_BYTES = 4 * HEADS.num_kv_heads * HEADS.head_dim
SCALE = 0.09


class Case(NamedTuple):
    """Groups of `num_sharers` neighbours that share prompts of each of the lengths."""

    num_rows: int
    kv_len: int
    num_sharers: int
    prompt_lens: tuple[int, ...]
    num_layers: int


CASES = [
    Case(192, 1390, 8, (0, 224, 512, 1024), 36),  # aime at K = 1024; longer prompts
    Case(128, 2304, 8, (0, 224, 512, 1024, 2048), 36),  # at K = 2048
    Case(64, 2304, 16, (512, 1024, 2048), 36),  # samples of long prompts
    Case(64, 8448, 64, (1024, 4096, 8192), 8),  # branches of one long thought
]


def make_batch(case: Case, prompt_len: int) -> AttentionBatch:
    """Scattered blocks; a group's neighbours begin with the same ones."""
    num_rows, kv_len = case.num_rows, case.kv_len
    generator = torch.Generator().manual_seed(num_rows + prompt_len)
    each, shared = -(-kv_len // HEADS.block_size), prompt_len // HEADS.block_size
    tables = (torch.randperm(num_rows * each, generator=generator) + 1).int().view(num_rows, each)
    for first in range(0, num_rows, case.num_sharers):
        tables[first : first + case.num_sharers, :shared] = tables[first, :shared].clone()
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    return AttentionBatch(starts, torch.full((num_rows,), kv_len, dtype=torch.int32), tables)


def exact_row(q: Tensor, layer_kv: Tensor, batch: AttentionBatch, row: int) -> Tensor:
    """float64 [num_q_heads, head_dim]."""
    kv_len, group_size = int(batch.kv_lens[row]), HEADS.num_q_heads // HEADS.num_kv_heads
    held = layer_kv[batch.block_tables[row].long().to(DEVICE)].double()
    keys, values = (
        part.flatten(0, 1)[:kv_len].repeat_interleave(group_size, 1) for part in held.unbind(1)
    )  # [kv_len, num_q_heads, head_dim] each
    scores = torch.einsum("hd,khd->hk", q[row].double(), keys) * SCALE
    return torch.einsum("hk,khd->hd", scores.softmax(1), values)


def shared_of(batch: AttentionBatch) -> Any:
    tables, kv_lens = batch.block_tables.numpy(), batch.kv_lens.numpy()
    return shared_blocks(tables, kv_lens, HEADS.block_size)


class Bench:
    """One load: pools of all layers, and its two ways to attend."""

    def __init__(self, num_rows: int, kv_len: int, num_layers: int) -> None:
        self.num_rows, self.kv_len = num_rows, kv_len
        num_blocks = num_rows * -(-kv_len // HEADS.block_size) + 1
        shape = (num_blocks, 2, HEADS.block_size, HEADS.num_kv_heads, HEADS.head_dim)
        kind = {"device": DEVICE, "dtype": torch.bfloat16}
        self.pools = [torch.empty(shape, **kind).normal_() for _ in range(num_layers)]
        self.q = torch.randn((num_rows, HEADS.num_q_heads, HEADS.head_dim), **kind)
        self.kernels = FlashInferAttention(DEVICE, torch.bfloat16)
        self.graphs = GraphDecode(
            self.kernels, HEADS, max_rows=num_rows, max_blocks=num_blocks // num_rows + 1
        )

    def plan(self, batch: AttentionBatch, way: str) -> AttentionPlan:
        if way == "plain":
            return self.graphs.plan(batch, self.num_rows, may_be_second=False)
        return self.graphs.plan_groups(batch, self.num_rows, best_groups(shared_of(batch), HEADS))

    def attend(self, pool: Tensor, plan: AttentionPlan) -> Tensor:
        return self.kernels.attention(self.q, pool, plan, SCALE, need_lse=True)[0]

    def error(self, batch: AttentionBatch, plan: AttentionPlan) -> float:
        """Of the worst of a few rows, relative."""
        found, worst = self.attend(self.pools[0], plan), 0.0
        for row in (0, 7, 8, self.num_rows - 1):
            wanted = exact_row(self.q, self.pools[0], batch, row)
            error = (found[row].double() - wanted).norm() / wanted.norm()
            worst = max(worst, float(error))
        return worst

    def layer_us(self, plan: AttentionPlan) -> float:
        """Of attention and merge in one layer, from a graph of all layers."""

        def work() -> None:
            for pool in self.pools:
                self.attend(pool, plan)

        return event_ms(capture(work).replay) / len(self.pools) * 1e3

    def merge_us(self, plan: AttentionPlan) -> float:
        """Of the merge alone, its operands in L2."""
        has_shared = plan.has_shared
        assert has_shared is not None, "the plan is not grouped"
        out = torch.randn((2 * self.num_rows, *self.q.shape[1:]), device=DEVICE).bfloat16()
        lse = torch.randn(out.shape[:2], device=DEVICE)
        lse_out = torch.empty_like(lse[: self.num_rows])

        def work() -> None:
            for _ in self.pools:
                merge_parts(out, lse, has_shared, lse_out)

        return event_ms(capture(work).replay) / len(self.pools) * 1e3


def measure(bench: Bench, case: Case, prompt_len: int) -> dict[str, Any]:
    batch = make_batch(case, prompt_len)
    groups = best_groups(shared_of(batch), HEADS)
    not_read = sum((g.end_row - g.first_row - 1) * g.num_blocks for g in groups)
    rows_bytes = bench.num_rows * bench.kv_len * SLOT_BYTES
    least_bytes = rows_bytes - not_read * HEADS.block_size * SLOT_BYTES
    found: dict[str, Any] = {"rows": bench.num_rows, "kv_len": bench.kv_len, "prompt": prompt_len}
    most = GroupedLayout(case.num_rows, HEADS).max_tiles
    found["groups"] = len(groups)
    found["engine_groups"] = bool(worthwhile_groups(shared_of(batch), HEADS, most))
    for way, read_bytes in (("plain", rows_bytes), ("grouped", least_bytes)):
        plan = bench.plan(batch, way)
        found[f"{way}_error"] = bench.error(batch, plan)
        found[f"{way}_us"] = layer_us = bench.layer_us(plan)
        found[f"{way}_as_if_gb_s"] = rows_bytes / layer_us / 1e3
        found[f"{way}_read_gb_s"] = read_bytes / layer_us / 1e3
        found[f"{way}_plan_us"] = host_us(lambda b=batch, w=way: bench.plan(b, w))
    found["merge_us"] = bench.merge_us(bench.plan(batch, "grouped"))
    found["gain"] = 1 - found["grouped_us"] / found["plain_us"]
    assert max(found["plain_error"], found["grouped_error"]) < 1e-2, found
    return found


def main() -> None:
    results = []
    for case in CASES:
        bench = Bench(case.num_rows, case.kv_len, case.num_layers)
        for prompt_len in case.prompt_lens:
            found = measure(bench, case, prompt_len)
            results.append(found)
            print(
                f"{case.num_rows} x {case.kv_len}, prompts of {prompt_len} shared by "
                f"{case.num_sharers}: plain {found['plain_us']:.1f} us "
                f"a layer ({found['plain_as_if_gb_s']:.0f} GB/s), grouped "
                f"{found['grouped_us']:.1f} us ({found['grouped_as_if_gb_s']:.0f} GB/s as if, "
                f"{found['grouped_read_gb_s']:.0f} read), gain {found['gain']:.1%}; merge alone "
                f"{found['merge_us']:.1f} us; plan {found['plain_plan_us']:.0f} and "
                f"{found['grouped_plan_us']:.0f} us; errors {found['plain_error']:.1e} and "
                f"{found['grouped_error']:.1e}; the engine "
                f"{'groups' if found['engine_groups'] else 'does not'}",
                flush=True,
            )
        del bench
        torch.cuda.empty_cache()
    print(json.dumps({"benchmark": "shared_prefix", "results": results}))


if __name__ == "__main__":
    main()
