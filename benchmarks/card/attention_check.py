"""FlashInfer attention on the card: against float64, under CUDA graphs, and against copy bandwidth.

Knows nothing of the engine.
"""

import dataclasses
from typing import Any

import torch
from timing import capture, event_ms, host_us
from torch import Tensor

from zipage_lang.kernels.attention import FlashInferAttention
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.dense_attention import DenseAttention
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.graph_decode import GraphDecode

DEVICE = torch.device("cuda", 0)


@dataclasses.dataclass
class Case:
    """Random queries and pool, scattered block tables."""

    q: Tensor
    layer_kv: Tensor
    batch: AttentionBatch
    heads: Heads


def make_case(
    q_lens: list[int], kv_lens: list[int], heads: Heads, dtype: torch.dtype, seed: int
) -> Case:
    host = torch.Generator().manual_seed(seed)
    card = torch.Generator(DEVICE).manual_seed(seed)
    num_blocks = [-(-kv_len // heads.block_size) for kv_len in kv_lens]
    pool_blocks = 1 + sum(num_blocks)
    free = (torch.randperm(pool_blocks - 1, generator=host) + 1).int()
    tables = torch.full((len(q_lens), max(num_blocks) + 1), -1, dtype=torch.int32)
    for row, (count, own) in enumerate(zip(num_blocks, free.split(num_blocks), strict=True)):
        tables[row, :count] = own
    kind = {"device": DEVICE, "dtype": dtype, "generator": card}
    pool_shape = (pool_blocks, 2, heads.block_size, heads.num_kv_heads, heads.head_dim)
    layer_kv = torch.randn(pool_shape, **kind)
    # Queries as a view into a merged QKV product, as the layers may pass them.
    merged = torch.randn(
        (sum(q_lens), heads.num_q_heads + 2 * heads.num_kv_heads, heads.head_dim), **kind
    )
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    batch = AttentionBatch(starts, torch.tensor(kv_lens, dtype=torch.int32), tables)
    return Case(merged[:, : heads.num_q_heads], layer_kv, batch, heads)


def expected(case: Case, scale: float) -> tuple[Tensor, Tensor]:
    """float64, one sequence at a time."""
    outs, lses = [], []
    group = case.heads.num_q_heads // case.heads.num_kv_heads
    starts, kv_lens = case.batch.q_starts.tolist(), case.batch.kv_lens.tolist()
    for row, kv_len in enumerate(kv_lens):
        q = case.q[starts[row] : starts[row + 1]].double()  # [q_len, num_q_heads, head_dim]
        blocks = case.batch.block_tables[row, : -(-kv_len // case.heads.block_size)]
        held = case.layer_kv[blocks.to(DEVICE).long()].double()
        keys, values = (
            part.flatten(0, 1)[:kv_len].repeat_interleave(group, 1) for part in held.unbind(1)
        )  # [kv_len, num_q_heads, head_dim] each
        scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
        last = torch.arange(len(q), device=DEVICE) + kv_len - len(q)
        hidden = torch.arange(kv_len, device=DEVICE) > last[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        lse = scores.logsumexp(-1)  # [num_q_heads, q_len]
        outs.append(torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), values))
        lses.append(lse.T / torch.log(torch.tensor(2.0, dtype=torch.float64, device=DEVICE)))
    return torch.cat(outs), torch.cat(lses)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check_eager(report: dict[str, Any]) -> None:
    """Decodes, mixed batches and long chunks, odd sizes, several head groupings."""
    loads = {
        "decodes": ([1] * 128, [1 + 37 * i % 2304 for i in range(128)]),
        "few decodes": ([1] * 5, [1, 17, 700, 2304, 9001]),
        "mixed": ([1] * 30 + [257, 1, 5, 64], [1 + 71 * i for i in range(30)] + [1000, 9, 5, 80]),
        "chunk": ([777], [3000]),
    }
    shapes = [(32, 8, 128), (16, 8, 128), (40, 8, 128), (64, 8, 128), (4, 2, 64)]
    worst = 0.0
    for shape in shapes:
        for block_size in (16, 64, 1):
            heads = Heads(*shape, block_size)
            kernels = FlashInferAttention(DEVICE, torch.bfloat16)
            for seed, (name, (q_lens, kv_lens)) in enumerate(loads.items()):
                case = make_case(q_lens, kv_lens, heads, torch.bfloat16, seed)
                plan = kernels.plan_attention(case.batch, *heads)
                out, lse = kernels.attention(case.q, case.layer_kv, plan, 0.09, True)
                right, right_lse = expected(case, 0.09)
                errors = error(out, right), error(lse, right_lse)
                worst = max(worst, errors[0], errors[1] * 10)
                if not (errors[0] < 6e-3 and errors[1] < 1e-3):
                    print(f"WRONG {heads} {name}: out {errors[0]:.2e} lse {errors[1]:.2e}")
                    report.setdefault("wrong", []).append(f"{heads} {name} {errors}")
    print(f"eager: worst relative error {worst:.2e}")
    report["worst_error"] = worst


def check_float32(report: dict[str, Any]) -> None:
    heads = Heads(6, 2, 24, 16)
    case = make_case([1, 1, 9, 3], [33, 5, 60, 3], heads, torch.float32, 3)
    kernels = DenseAttention(DEVICE)
    plan = kernels.plan_attention(case.batch, *heads)
    out, lse = kernels.attention(case.q, case.layer_kv, plan, 0.2, True)
    right, right_lse = expected(case, 0.2)
    report["float32_errors"] = [error(out, right), error(lse, right_lse)]
    print(f"float32 (torch): {report['float32_errors']}")


def check_graphs(report: dict[str, Any]) -> None:
    """One capture per bucket, replayed over other lengths and fewer rows."""
    heads = Heads(32, 8, 128, 16)
    kernels = FlashInferAttention(DEVICE, torch.bfloat16)
    graphs = GraphDecode(kernels, heads, max_rows=128, max_blocks=300)
    worst = 0.0
    for bucket in (1, 4, 32, 34, 128):
        rows = [bucket, max(1, bucket // 2), max(1, bucket - 1), bucket]
        lens = [[1 + (91 * i + 13 * s) % 4000 for i in range(n)] for s, n in enumerate(rows)]
        cases = [
            make_case([1] * n, kv_lens, heads, torch.bfloat16, 50 + s)
            for s, (n, kv_lens) in enumerate(zip(rows, lens, strict=True))
        ]
        pool = torch.zeros_like(max((case.layer_kv for case in cases), key=len))
        q = torch.zeros((bucket, *cases[0].q.shape[1:]), dtype=torch.bfloat16, device=DEVICE)
        held: list[Any] = [None]
        plan = graphs.plan(cases[0].batch, bucket)

        def work(q=q, pool=pool, plan=plan, held=held):
            held[0] = kernels.attention(q, pool, plan, 0.09, True)

        graph = capture(work)
        for case, n in zip(cases, rows, strict=True):
            pool[: len(case.layer_kv)] = case.layer_kv
            q[:n] = case.q
            for tensor in held[0]:
                tensor.fill_(float("nan"))
            graphs.plan(case.batch, bucket)
            graph.replay()
            out, lse = held[0]
            right, right_lse = expected(case, 0.09)
            errors = error(out[:n], right), error(lse[:n], right_lse)
            worst = max(worst, errors[0])
            is_whole = bool(torch.isfinite(out).all() and torch.isfinite(lse).all())
            if not (errors[0] < 6e-3 and errors[1] < 1e-3 and is_whole):
                print(f"WRONG graph bucket {bucket} rows {n}: {errors} finite={is_whole}")
                report.setdefault("wrong", []).append(f"graph {bucket} {n} {errors}")
            eager = kernels.plan_attention(case.batch, *heads)
            again, _ = kernels.attention(q[:n], pool, eager, 0.09, True)
            if n == bucket and bucket >= 34 and not torch.equal(again, out[:n]):
                print(f"graph bucket {bucket}: differs in bits from the eager launch")
    report["worst_graph_error"] = worst
    print(f"graphs: worst relative error {worst:.2e}")


def time_decode(report: dict[str, Any], copy_bytes_per_s: float, num_layers: int = 24) -> None:
    """Attention alone, one graph over layers with a pool each."""
    for num_seqs, kv_len, block_size in ((128, 2304, 16), (128, 2304, 64), (64, 4608, 16)):
        heads = Heads(32, 8, 128, block_size)
        case = make_case([1] * num_seqs, [kv_len] * num_seqs, heads, torch.bfloat16, 1)
        pools = [torch.randn_like(case.layer_kv) for _ in range(num_layers)]
        kernels = FlashInferAttention(DEVICE, torch.bfloat16)
        graphs = GraphDecode(kernels, heads, max_rows=num_seqs, max_blocks=kv_len // block_size)
        q = case.q.contiguous()
        plan = graphs.plan(case.batch, num_seqs)
        for need_lse in (False, True):

            def work(plan=plan, need_lse=need_lse, q=q, pools=pools, kernels=kernels):
                for pool in pools:
                    kernels.attention(q, pool, plan, 0.09, need_lse)

            ms = event_ms(capture(work).replay) / num_layers
            num_bytes = num_seqs * kv_len * 2 * 8 * 128 * 2
            share = num_bytes / (ms / 1e3) / copy_bytes_per_s
            name = f"{num_seqs}x{kv_len} block {block_size} lse {need_lse}"
            print(f"decode {name}: {ms * 1e3:.1f} us a layer, {share:.1%} of copy bandwidth")
            report[name] = {"us": ms * 1e3, "share_of_copy": share}
        plan_us = host_us(lambda g=graphs, c=case, n=num_seqs: g.plan(c.batch, n))
        run_us = host_us(
            lambda k=kernels, p=plan, q=q, c=case: k.attention(q, c.layer_kv, p, 0.09, True)
        )
        report[f"{num_seqs}x{kv_len} block {block_size} host"] = {
            "plan_us": plan_us,
            "run_us": run_us,
        }
        print(f"  host: plan {plan_us:.0f} us, one eager launch {run_us:.0f} us")
        del pools, case, kernels, graphs, plan


def time_mixed(report: dict[str, Any]) -> None:
    """A chunk beside decodes: two launches (ours) against one causal launch."""
    heads = Heads(32, 8, 128, 16)
    for chunk in (128, 512, 2048):
        q_lens, kv_lens = [1] * 112 + [chunk], [2304] * 112 + [chunk + 512]
        case = make_case(q_lens, kv_lens, heads, torch.bfloat16, 2)
        kernels = FlashInferAttention(DEVICE, torch.bfloat16)
        split = kernels.plan_attention(case.batch, *heads)
        two = event_ms(
            lambda c=case, p=split, k=kernels: k.attention(c.q, c.layer_kv, p, 0.09, False)
        )
        # The same work with the chunk in front has no leading decodes, so it is one launch.
        starts = torch.tensor([0, chunk, *[1] * 112]).cumsum(0).int()
        order = [112, *range(112)]
        turned = AttentionBatch(starts, case.batch.kv_lens[order], case.batch.block_tables[order])
        whole = kernels.plan_attention(turned, *heads)
        one = event_ms(
            lambda c=case, p=whole, k=kernels: k.attention(c.q, c.layer_kv, p, 0.09, False)
        )
        print(
            f"112 decodes + chunk {chunk}: two launches {two * 1e3:.0f} us, one {one * 1e3:.0f} us"
        )
        report[f"mixed {chunk}"] = {"two_us": two * 1e3, "one_us": one * 1e3}
