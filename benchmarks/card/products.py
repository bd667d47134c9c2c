"""Decode products on the card: right, how fast each is, and a whole stack of layers in one graph.

    python3 benchmarks/card/products.py [check sweep chain]

Each stage and kernel runs in a process of its own with a time limit, so that none can take down or
hold up the rest. Prints tables; `sweep` ends in lines for `kernels/hopper/choose.py`.
Knows nothing of the engine.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import capture, copy_rate, event_ms
from torch import Tensor
from torch.nn.functional import linear

LAYERS = 36
HIDDEN, INNER, Q_SIZE, HEAD_DIM = 4096, 12288, 4096, 128
# name: (out_size, in_size, gated)
SHAPES = {
    "qkv": (6144, HIDDEN, False),
    "o": (HIDDEN, Q_SIZE, False),
    "gate_up": (2 * INNER, HIDDEN, True),
    "down": (HIDDEN, INNER, False),
}
ADDING = ("o", "down")  # to the residual stream
HEAD = (151936, HIDDEN, False)
ROWS = (256, 224, 128, 96, 64, 192, 160, 32, 8)
CHAIN_ROWS = (8, 64, 96, 128, 192, 224, 248, 256)
EPS = 1e-6
NUM_CANDIDATES = 14
CHECK_LIMIT_S, STAGE_LIMIT_S = 40, 100
HERE = Path(__file__).resolve().parent
BEST_FILE = Path(tempfile.gettempdir()) / "zipage_products_best.json"

Products = dict[str, list[Any]]


def random_weights() -> dict[str, list[Tensor]]:
    weights = {}
    for name, (out_size, in_size, _) in SHAPES.items():
        shape = (LAYERS, out_size, in_size)
        stacked = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        weights[name] = list(stacked.normal_(0, in_size**-0.5))
    head = torch.empty(HEAD[:2], device="cuda", dtype=torch.bfloat16)
    weights["head"] = [head.normal_(0, HIDDEN**-0.5)]
    return weights


def shape_of(name: str) -> tuple[int, int, bool]:
    return HEAD if name == "head" else SHAPES[name]


def hopper_products(weights: dict[str, list[Tensor]]) -> Products:
    # The weights are random, so that gate and up rows need no interleaving.
    from zipage_lang.kernels.hopper.linear import HopperLinear

    return {
        name: [HopperLinear(weight, None, shape_of(name)[2]) for weight in stack]
        for name, stack in weights.items()
    }


class CublasProduct:
    def __init__(self, weight: Tensor, gated: bool) -> None:
        self.weight, self.gated = weight, gated

    def __call__(self, x: Tensor) -> Tensor:
        from zipage_lang.kernels import fused_ops

        out = linear(x, self.weight)
        return fused_ops.silu_mul_interleaved(out, 8) if self.gated else out


def cublas_products(weights: dict[str, list[Tensor]]) -> Products:
    return {
        name: [CublasProduct(weight, shape_of(name)[2]) for weight in stack]
        for name, stack in weights.items()
    }


def inputs(name: str, rows: int) -> Tensor:
    return torch.randn(rows, shape_of(name)[1], device="cuda", dtype=torch.bfloat16)


def ours(name: str, rows: int) -> Callable[[Any, Any], object]:
    """A product as a layer runs it, cut by a config: behind a norm, or adding to the stream."""
    x = inputs(name, rows)
    if name in ("qkv", "gate_up"):
        squares = torch.ones(32, rows, device="cuda")
        return lambda product, config: product.normed(x, squares, EPS, config)
    if name in ADDING:
        residual = inputs("qkv", rows)
        return lambda product, config: product.add(x, residual, config)
    return lambda product, config: product(x, config)


def theirs(name: str, rows: int) -> Callable[[Any], object]:
    """The same by cuBLAS, with the launch that adds and normalises."""
    from zipage_lang.kernels import fused_ops

    x, residual = inputs(name, rows), inputs("qkv", rows)
    if name in ADDING:
        return lambda product: fused_ops.add_rms_norm(product(x), residual, None, EPS)
    return lambda product: product(x)


def each_us(run: Callable[[Any], object], products: list[Any], repeats: int = 5) -> float:
    """Device time of one product, all layers' weights in turn in one graph."""
    times = max(1, 4 // len(products))

    def work() -> None:
        for product in products * times:
            run(product)

    graph = capture(work, warmups=1)
    return event_ms(graph.replay, repeats, warmups=1) * 1e3 / (len(products) * times)


def tried(work: Callable[[], float]) -> float:
    """Its time, or infinity and the reason printed."""
    try:
        return work()
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise
        print(f"    {str(error).splitlines()[0][:150]}")
        return float("inf")


def label(config: Any) -> str:
    return f"{config.groups * 64}/s{config.splits}/x{config.sharers}"


def candidates(name: str, rows: int) -> list[Any]:
    """The likeliest cuts by the rule, and the likeliest of each tile and sharing."""
    from zipage_lang.kernels.hopper.choose import ranked_configs
    from zipage_lang.kernels.hopper.library import clusters_held

    out_size, in_size, _ = shape_of(name)
    adds = name in ADDING
    ranked = ranked_configs(rows, out_size, in_size, clusters_held(), adds=adds)
    chosen = ranked[: NUM_CANDIDATES // 2]
    seen = {(config.groups, config.sharers) for config in chosen}
    for config in ranked:
        if (config.groups, config.sharers) not in seen and len(chosen) < NUM_CANDIDATES:
            seen.add((config.groups, config.sharers))
            chosen.append(config)
    return chosen


def sweep(weights: dict[str, list[Tensor]], rate: float) -> dict[str, list[Any]]:
    """Times of the likeliest cuts; the best of each (shape, rows)."""
    from zipage_lang.kernels.hopper.library import clusters_held

    print("clusters held at once, by size from 0:", clusters_held())
    hopper, cublas = hopper_products(weights), cublas_products(weights)
    best: dict[str, list[Any]] = {}
    for name in ("o", "gate_up", "down", "qkv", "head"):
        out_size, in_size, _ = shape_of(name)
        least = out_size * in_size * 2 / rate
        print(f"{name}: least {least:.1f} us; us (share of copy bandwidth) and the next best cuts")
        for rows in ROWS if name != "head" else (64, 128, 256):
            mine = ours(name, rows)
            run = {
                config: tried(
                    lambda c=config, mine=mine, name=name: each_us(
                        lambda p: mine(p, c), hopper[name]
                    )
                )
                for config in candidates(name, rows)
            }
            order = sorted(run, key=run.__getitem__)
            cublas_us = tried(lambda r=rows, n=name: each_us(theirs(n, r), cublas[n]))
            hopper_us = run[order[0]]
            best[f"{name} {rows}"] = [*order[0], cublas_us < hopper_us]
            line = f"{rows:4d} cublas {cublas_us:6.1f} ({least / cublas_us:4.0%})"
            line += f" hopper {hopper_us:6.1f} ({least / hopper_us:4.0%}) |"
            print(line, *(f"{label(config)}={run[config]:.1f}" for config in order[:7]), flush=True)
    return best


def stack_of_layers(products: Products, rows: int) -> Callable[[], Tensor]:
    """All layers but attention, of which only the reading of q is left."""
    from zipage_lang.kernels import fused_ops

    ones = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    start = inputs("qkv", rows)

    def call(name: str, index: int, x: Tensor) -> Tensor:
        return products[name][index](x)

    def work() -> Tensor:
        residual = start
        normed = fused_ops.rms_norm(residual, ones, 1e-6)
        for index in range(LAYERS):
            qkv = call("qkv", index, normed)
            q = qkv[:, :Q_SIZE].view(rows, -1, HEAD_DIM)
            attended = fused_ops.rms_norm(q, ones[:HEAD_DIM], 1e-6).view(rows, Q_SIZE)
            mixed = call("o", index, attended)
            normed, residual = fused_ops.add_rms_norm(mixed, residual, ones, 1e-6)
            inner = call("gate_up", index, normed)
            fed = call("down", index, inner)
            normed, residual = fused_ops.add_rms_norm(fed, residual, ones, 1e-6)
        return residual

    return work


def stream_of_layers(prepared: Products, rows: int) -> Callable[[], Tensor]:
    """The same as a model runs them: norms and additions in the products that can."""
    from zipage_lang.kernels import fused_ops
    from zipage_lang.kernels.products import CardProducts
    from zipage_lang.kernels.residual_stream import ResidualStream

    ones = torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    start = inputs("qkv", rows)

    def work() -> Tensor:
        stream = ResidualStream(start, EPS)
        for index in range(LAYERS):
            qkv = CardProducts.normed_linear(stream, prepared["qkv"][index])
            q = qkv[:, :Q_SIZE].view(rows, -1, HEAD_DIM)
            attended = fused_ops.rms_norm(q, ones, EPS).view(rows, Q_SIZE)
            CardProducts.add_linear(stream, attended, prepared["o"][index])
            inner = CardProducts.normed_gated_linear(stream, prepared["gate_up"][index])
            CardProducts.add_linear(stream, inner, prepared["down"][index])
        stream.normed(None)
        return stream.values

    return work


def prepared_products(hopper: Products) -> Products:
    from zipage_lang.kernels.products import PreparedProduct

    return {
        name: [PreparedProduct(product.weight, None, product, None) for product in stack]
        for name, stack in hopper.items()
    }


def use_best(best: dict[str, Any]) -> None:
    """Let the sweep's results be what is chosen."""
    from zipage_lang.kernels.hopper import choose

    lost = set()
    for key, (*config, is_cublas_faster) in best.items():
        name, rows = key.split()
        out_size, in_size, _ = shape_of(name)
        shape = choose.padded_rows(int(rows)), out_size, in_size
        choose.MEASURED[shape] = tuple(config)
        if is_cublas_faster:
            lost.add(shape)
    choose.CUBLAS_IS_FASTER = frozenset(lost)
    choose.choose_config.cache_clear()


def chain(weights: dict[str, list[Tensor]], rate: float) -> None:
    from zipage_lang.kernels import products as card_products

    all_bytes = sum(weight.nbytes for name in SHAPES for weight in weights[name])
    least = all_bytes / rate / 1e3
    print(f"stack of {LAYERS} layers without attention: least {least:.2f} ms; ms (share), distance")
    hopper = hopper_products(weights)
    prepared, usual = prepared_products(hopper), card_products.ROWS_NORMED_APART
    variants = {
        "cublas": (stack_of_layers, cublas_products(weights), usual),
        "ours, norms apart": (stack_of_layers, hopper, usual),
        "ours, norms inside": (stream_of_layers, prepared, range(0)),
        "as the engine": (stream_of_layers, prepared, usual),
    }
    for rows in CHAIN_ROWS:
        line, reference = f"{rows:4d}", None
        for name, (stack, products, apart) in variants.items():
            torch.manual_seed(rows)
            card_products.ROWS_NORMED_APART = apart
            try:
                work = stack(products, rows)
                out = work().double()
                reference = out if reference is None else reference
                distance = ((out - reference).norm() / reference.norm()).item()
                ms = event_ms(capture(work, warmups=1).replay, 10)
            except Exception as error:
                print(f"  {name} {rows}: {str(error)[:300]}")
                if "CUDA error" in str(error):
                    raise
                continue
            line += f"  {name} {ms:.3f} ({least / ms:.0%}) {distance:.0e}"
        print(line, flush=True)


def stage_sweep() -> None:
    from zipage_lang.kernels.hopper.choose import padded_rows

    rate, weights = copy_rate() / 1e6, random_weights()  # bytes a microsecond
    print(f"copy {rate / 1e6:.3f} TB/s")
    best = sweep(weights, rate)
    BEST_FILE.write_text(json.dumps(best))
    print("MEASURED = {")
    lost = []
    for key, (*config, is_cublas_faster) in best.items():
        name, rows = key.split()
        shape = padded_rows(int(rows)), *shape_of(name)[:2]
        print(f"    {shape}: {tuple(config)},")
        if is_cublas_faster:
            lost.append(shape)
    print("}")
    print("CUBLAS_IS_FASTER = frozenset({", *(f"    {shape}," for shape in lost), "})", sep="\n")


def stage_chain() -> None:
    rate, weights = copy_rate() / 1e6, random_weights()  # bytes a microsecond
    if BEST_FILE.exists():
        use_best(json.loads(BEST_FILE.read_text()))
    chain(weights, rate)


def run_limited(arguments: list[str], limit_s: float) -> subprocess.Popen:
    return subprocess.Popen(["timeout", "-k", "2", str(limit_s), sys.executable, *arguments])


def main() -> None:
    stages = sys.argv[1:] or ["check", "sweep", "chain"]
    started = time.perf_counter()
    if "check" in stages:
        one = run_limited([str(HERE / "products_check.py")], CHECK_LIMIT_S)
        if one.wait():
            print(f"check ended with {one.returncode} (124: took over {CHECK_LIMIT_S} s)")
    for stage in ("sweep", "chain"):
        if stage in stages:
            one = run_limited([str(HERE / "products.py"), f"only-{stage}"], STAGE_LIMIT_S)
            if one.wait():
                print(f"{stage} ended with {one.returncode} (124: took over {STAGE_LIMIT_S} s)")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    if sys.argv[1:] == ["only-sweep"]:
        stage_sweep()
    elif sys.argv[1:] == ["only-chain"]:
        stage_chain()
    else:
        main()
