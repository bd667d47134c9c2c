"""The decode products on the card: right first, then which cut is fastest, then a chain of layers.

    bash -c "source benchmarks/card/setup.sh && python3 benchmarks/card/skinny_tune.py"

Every timed graph runs over 36 distinct weights, so that none is found in L2. A product is timed
with the kernel that reads its partial sums. Knows nothing of the engine.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from timing import capture, event_ms
from torch import Tensor
from torch.nn.functional import linear

from zipage_lang.kernels import fused_ops, kv_store, skinny
from zipage_lang.kernels.dependent_launch import launch_options
from zipage_lang.kernels.skinny import SkinnyConfig, SkinnyLinear, choose_config, padded_rows

NUM_LAYERS = 36
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, BLOCK_SIZE = 32, 8, 128, 4096, 12288, 16
PRODUCTS = {  # name: (out_size, in_size, gated)
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, False),
    "o": (HIDDEN, HEADS * HEAD_DIM, False),
    "gate_up": (2 * INTERMEDIATE, HIDDEN, True),
    "down": (HIDDEN, INTERMEDIATE, False),
}
DEVICE, DTYPE, EPS = torch.device("cuda", 0), torch.bfloat16, 1e-6
NUM_COMPILERS = max(1, min(15, (os.cpu_count() or 2) - 1))
CHECKED_ROWS = {True: (1, 17, 100, 256), False: (32, 64, 128, 192)}  # with and without a bias


class Job(NamedTuple):
    """One kernel."""

    product: str
    num_rows: int
    config: SkinnyConfig
    has_bias: bool = False


@contextlib.contextmanager
def overlap(enabled: bool) -> Iterator[None]:
    """Programmatic dependent launch on or off, for all kernels launched inside."""
    modules = (fused_ops, kv_store, skinny)
    options = launch_options if enabled else lambda device: {"PDL": False}
    for module in modules:
        module.launch_options = options
    try:
        yield
    finally:
        for module in modules:
            module.launch_options = launch_options


class Context(NamedTuple):
    """What the kernels around the products read, for one number of rows."""

    residual: Tensor  # [num_rows, HIDDEN]
    norm_weight: Tensor
    head_weight: Tensor
    cos: Tensor
    sin: Tensor
    pool: Tensor
    slots: Tensor

    @classmethod
    def make(cls, num_rows: int) -> "Context":
        kind = {"device": DEVICE, "dtype": DTYPE}
        angle = torch.rand(num_rows, HEAD_DIM // 2, device=DEVICE) * 100
        num_blocks = -(-num_rows // BLOCK_SIZE)
        return cls(
            torch.randn(num_rows, HIDDEN, **kind),
            torch.rand(HIDDEN, **kind) + 0.5,
            torch.rand(HEAD_DIM, **kind) + 0.5,
            angle.cos().to(DTYPE),
            angle.sin().to(DTYPE),
            torch.zeros(num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, **kind),
            torch.randperm(num_blocks * BLOCK_SIZE, device=DEVICE)[:num_rows],
        )

    def store(self, partials: Tensor) -> Tensor:
        head, angles = self.head_weight, (self.cos, self.sin)
        return fused_ops.qk_norm_rope_store_partials(
            partials, head, head, EPS, *angles, self.pool, self.slots
        )

    def add(self, partials: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return fused_ops.add_rms_norm_partials(partials, residual, self.norm_weight, EPS)

    def follow(self, product: str, partials: Tensor) -> Any:
        """The kernel after a product; the gate's activation is in the product."""
        if product == "qkv":
            return self.store(partials)
        return partials if product == "gate_up" else self.add(partials, self.residual)


# -- right


def checked_jobs() -> list[Job]:
    return [
        Job(product, num_rows, choose_config(num_rows, *shape), has_bias)
        for (product, shape), has_bias in itertools.product(PRODUCTS.items(), (False, True))
        for num_rows in CHECKED_ROWS[has_bias]
    ]


def check_products() -> None:
    """Each product after a norm that writes its rows, in a graph, with poisoned outputs."""
    worst = 0.0
    for (name, (out_size, in_size, gated)), with_bias in itertools.product(
        PRODUCTS.items(), (False, True)
    ):
        weight = torch.randn(out_size, in_size, device=DEVICE, dtype=DTYPE) * 0.02
        bias = torch.randn(out_size, device=DEVICE, dtype=DTYPE) if with_bias else None
        prepared = SkinnyLinear.prepare(weight, bias, gated)
        ones = torch.ones(in_size, device=DEVICE, dtype=DTYPE)
        for num_rows in CHECKED_ROWS[with_bias]:
            x = torch.randn(num_rows, in_size, device=DEVICE, dtype=DTYPE)
            kept: dict[str, Tensor] = {}

            def work(x: Tensor = x, kept: dict[str, Tensor] = kept) -> None:
                kept["x"] = fused_ops.rms_norm(x, ones, EPS)  # noqa: B023
                kept["parts"] = prepared.partials(kept["x"])  # noqa: B023
                kept["out"] = skinny.sum_partials(kept["parts"], DTYPE)

            graph = capture(work)
            for _ in range(3):
                x.normal_()
                for tensor in kept.values():
                    tensor.fill_(float("nan"))
                graph.replay()
                exact = kept["x"].double() @ weight.double().T
                exact += 0 if bias is None else bias.double()
                if gated:
                    gate, up = exact.chunk(2, dim=-1)
                    exact = gate * torch.sigmoid(gate) * up
                error = (kept["out"].double() - exact).abs().max() / exact.abs().max()
                assert error < 4e-3, (name, num_rows, with_bias, error.item())
                worst = max(worst, error.item())
        if with_bias:
            print(f"right: {name} in 8 row counts, with and without bias", flush=True)
    print(f"right: largest error {worst:.1e} of the largest output", flush=True)


# -- which cut


def candidates(product: str, num_rows: int) -> list[SkinnyConfig]:
    """Tiles that fit, with one or two programs an SM."""
    out_size, _, gated = PRODUCTS[product]
    rows, found = padded_rows(num_rows), {choose_config(num_rows, *PRODUCTS[product])}
    for tile, per_sm, block_k in itertools.product((64, 128, 192, 256), (1, 2), (64, 128)):
        tiles = -(-out_size // tile)
        num_splits = 1 if gated else max(1, skinny.NUM_SMS * per_sm // tiles)
        stage_bytes = (tile + rows) * block_k * 2
        num_stages = min(7, skinny.SHARED_BYTES // per_sm // stage_bytes)
        too_wide = tile * rows * per_sm > skinny.MAX_TILE or (tile == 64 and rows > 64)
        if too_wide or num_stages < 3 or num_splits > 16:
            continue
        for num_warps in (4, 8):
            threads = 32 * num_warps
            if 32 <= tile * rows / threads <= 128 or (num_warps == 4 and tile * rows < 8192):
                block_n, tail_n = (128, 64) if tile == 192 else (tile, 0)
                cut = (block_n, tail_n, block_k, num_splits, num_stages, num_warps)
                found.add(SkinnyConfig(*cut))
    return sorted(found, key=str)


def variants(config: SkinnyConfig) -> dict[str, SkinnyConfig]:
    """One thing changed at a time, from the best."""
    found = {f"prefetch {columns}": config._replace(prefetch=columns) for columns in (0, 64, 256)}
    found["no tma"] = config._replace(tma=False)
    if config.num_splits > 1:
        found["bf16 partials"] = config._replace(partial_dtype=DTYPE)
    return found


def compile_job(job: Job) -> str | None:
    """In a process of its own: leaves the kernel in Triton's cache on disk."""
    product, num_rows, config, has_bias = job
    out_size, in_size, gated = PRODUCTS[product]
    weight = torch.empty(out_size, in_size, device=DEVICE, dtype=DTYPE)
    bias = torch.empty(out_size, device=DEVICE, dtype=DTYPE) if has_bias else None
    x = torch.empty(num_rows, in_size, device=DEVICE, dtype=DTYPE)
    try:
        SkinnyLinear(weight, bias, gated).run(x, config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(pool: Any, jobs: list[Job]) -> list[Job]:
    """The jobs that compile and run."""
    started = time.perf_counter()
    errors = pool.map(compile_job, jobs, chunksize=1)
    for job, error in [pair for pair in zip(jobs, errors, strict=True) if pair[1]][:5]:
        print("left out:", *job, error)
    good = [job for job, error in zip(jobs, errors, strict=True) if error is None]
    print(
        f"compiled {len(good)} of {len(jobs)} in {time.perf_counter() - started:.0f} s", flush=True
    )
    return good


class Sweep:
    """Times products over one buffer that holds 36 weights of any shape."""

    def __init__(self) -> None:
        largest = max(out_size * in_size for out_size, in_size, _ in PRODUCTS.values())
        self._buffer = torch.empty(NUM_LAYERS, largest, device=DEVICE, dtype=DTYPE)
        for layer in self._buffer:
            layer.normal_(std=0.02)

    def weights(self, product: str) -> list[Tensor]:
        out_size, in_size, _ = PRODUCTS[product]
        return [layer[: out_size * in_size].view(out_size, in_size) for layer in self._buffer]

    def cublas_us(self, product: str, num_rows: int, alone: bool) -> float:
        context, x = Context.make(num_rows), self._rows(product, num_rows)
        gated = PRODUCTS[product][2]

        def one(weight: Tensor) -> None:
            out = linear(x, weight)
            if not alone:
                fused_ops.silu_mul(out) if gated else context.follow(product, out[None])

        return self._layers_us(lambda: [one(weight) for weight in self.weights(product)])

    def skinny_us(self, job: Job, alone: bool) -> float:
        product, num_rows, config, _ = job
        gated = PRODUCTS[product][2]
        context, x = Context.make(num_rows), self._rows(product, num_rows)
        layers = [SkinnyLinear(weight, None, gated) for weight in self.weights(product)]
        self._check(layers[0], x, config)

        def work() -> None:
            for layer in layers:
                partials = layer.run(x, config)
                if not alone:
                    context.follow(product, partials)

        return self._layers_us(work)

    @staticmethod
    def _check(layer: SkinnyLinear, x: Tensor, config: SkinnyConfig) -> None:
        out = layer.run(x, config).float().sum(0)
        want = linear(x, layer.weight).float()
        if layer.gated:  # groups of gate and up in turn
            gate, up = want.view(len(x), -1, 2, skinny.GATE_GROUP).unbind(2)
            want = (gate * torch.sigmoid(gate) * up).reshape(len(x), -1)
        error = (out - want).abs().max() / want.abs().max()
        assert error < 2e-2, (config, error.item())

    @staticmethod
    def _rows(product: str, num_rows: int) -> Tensor:
        return torch.randn(num_rows, PRODUCTS[product][1], device=DEVICE, dtype=DTYPE)

    @staticmethod
    def _layers_us(work: Callable[[], object]) -> float:
        return event_ms(capture(work, 1).replay, repeats=7) * 1e3 / NUM_LAYERS


def brief(config: SkinnyConfig) -> str:
    """tile x block_k, splits, stages, warps"""
    tile = f"{config.block_n}+{config.tail_n}" if config.tail_n else f"{config.block_n}"
    return f"{tile}x{config.block_k} s{config.num_splits} st{config.num_stages} w{config.num_warps}"


def swept_jobs(rows: list[int]) -> list[Job]:
    return [
        Job(product, num_rows, config)
        for num_rows, product in itertools.product(rows, PRODUCTS)
        for config in candidates(product, num_rows)
    ]


def sweep_all(
    good: list[Job], copy_rate: float, pool: Any, deadline: float
) -> dict[tuple[str, int], SkinnyConfig]:
    """Cut by (product, num_rows): the fastest of the jobs that compile."""
    cases = list(dict.fromkeys((job.num_rows, job.product) for job in good))
    sweep, best = Sweep(), {}
    print("with the kernel that follows, us a layer; (alone: % of copy bandwidth)")
    for num_rows, product in cases:
        mine = [job for job in good if job[:2] == (product, num_rows)]
        if time.perf_counter() > deadline:
            print(f"{num_rows:4} {product:8} skipped")
            continue
        ranked = sorted((sweep.skinny_us(job, alone=False), job) for job in mine)
        us, job = ranked[0]
        best[product, num_rows] = job.config
        num_bytes = PRODUCTS[product][0] * PRODUCTS[product][1] * 2
        rule = choose_config(num_rows, *PRODUCTS[product])
        rule_us = next((t for t, other in ranked if other.config == rule), float("nan"))
        with overlap(False):
            serial_us = sweep.skinny_us(job, alone=False)
        share, cublas_share = (
            num_bytes / alone_us * 1e6 / copy_rate
            for alone_us in (
                sweep.skinny_us(job, alone=True),
                sweep.cublas_us(product, num_rows, alone=True),
            )
        )
        print(
            f"{num_rows:4} {product:8} skinny {us:6.1f} ({share:4.0%})  cublas "
            f"{sweep.cublas_us(product, num_rows, alone=False):6.1f} ({cublas_share:4.0%})  "
            f"no pdl {serial_us:6.1f}  rule {rule_us:6.1f}  | {brief(job.config)} | then "
            + ", ".join(f"{brief(other.config)} {t:.1f}" for t, other in ranked[1:4]),
            flush=True,
        )
    changed = [
        (key, name, config)
        for key, chosen in best.items()
        if key[1] in (64, 128)
        for name, config in variants(chosen).items()
    ]
    if time.perf_counter() < deadline:
        good = compile_all(pool, [Job(*key, config) for key, _, config in changed])
        for key, group in itertools.groupby(changed, key=lambda change: change[0]):
            times = [
                f"{name} {sweep.skinny_us(Job(*key, config), alone=False):.1f}"
                for _, name, config in group
                if Job(*key, config) in good
            ]
            print(f"{key[1]:4} {key[0]:8} changed: {', '.join(times)}", flush=True)
    return best


# -- the chain


class Chain:
    """36 layers of Qwen3-8B's decode step; attention is a copy of its queries."""

    def __init__(self) -> None:
        def prepare(name: str) -> list[SkinnyLinear]:
            out_size, in_size, gated = PRODUCTS[name]
            made = []
            for _ in range(NUM_LAYERS):
                weight = torch.empty(out_size, in_size, device=DEVICE, dtype=DTYPE)
                made.append(SkinnyLinear(weight.normal_(std=0.02), None, gated))
            return made

        self._layers = {name: prepare(name) for name in PRODUCTS}

    def skinny(
        self, x: Tensor, context: Context, cuts: dict[str, SkinnyConfig]
    ) -> tuple[Tensor, Tensor]:
        def product(name: str, layer: int, rows: Tensor) -> Tensor:
            return self._layers[name][layer].run(rows, cuts[name])

        return self._run(x, context, product, lambda rows: rows[0])

    def cublas(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        def product(name: str, layer: int, rows: Tensor) -> Tensor:
            return linear(rows, self._layers[name][layer].weight)[None]

        group = skinny.GATE_GROUP
        return self._run(
            x, context, product, lambda rows: fused_ops.silu_mul_interleaved(rows[0], group)
        )

    @staticmethod
    def _run(
        x: Tensor,
        context: Context,
        product: Callable[[str, int, Tensor], Tensor],
        gate: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        normed, residual = fused_ops.rms_norm(x, context.norm_weight, EPS), x
        for layer in range(NUM_LAYERS):
            q = context.store(product("qkv", layer, normed))
            attended = q.clone().view(len(x), -1)  # [num_rows, HEADS * HEAD_DIM]
            normed, residual = context.add(product("o", layer, attended), residual)
            gated = gate(product("gate_up", layer, normed))
            normed, residual = context.add(product("down", layer, gated), residual)
        return normed, residual


def time_chain(
    rows: list[int], best: dict[tuple[str, int], SkinnyConfig], copy_rate: float
) -> None:
    chain = Chain()
    weight_bytes = NUM_LAYERS * sum(2 * n * k for n, k, _ in PRODUCTS.values())
    floor_ms = weight_bytes / copy_rate * 1e3
    print(f"chain of {NUM_LAYERS} layers, ms; the weights alone at copy bandwidth: {floor_ms:.2f}")
    for num_rows in rows:
        context = Context.make(num_rows)
        x = torch.randn(num_rows, HIDDEN, device=DEVICE, dtype=DTYPE)
        cuts = {
            name: best.get((name, num_rows), choose_config(num_rows, *shape))
            for name, shape in PRODUCTS.items()
        }
        works = {
            "cublas": lambda x=x, c=context: chain.cublas(x, c),
            "skinny": lambda x=x, c=context, cuts=cuts: chain.skinny(x, c, cuts),
        }
        times, outputs = [], {}
        for (name, work), enabled in itertools.product(works.items(), (False, True)):
            kept: list[Any] = []
            with overlap(enabled):
                graph = capture(lambda work=work, kept=kept: kept.append(work()))
            ms = event_ms(graph.replay, repeats=7)
            times.append(f"{name}{' pdl' if enabled else ''} {ms:.2f} ({floor_ms / ms:.0%})")
            outputs[name, enabled] = replays(graph, kept[-1], x)
        same = all(
            torch.equal(serial, overlapped)
            for serial, overlapped in zip(
                outputs["skinny", False], outputs["skinny", True], strict=True
            )
        )
        error = (outputs["skinny", True][-1] - outputs["cublas", False][-1]).float().norm()
        error /= outputs["cublas", False][-1].float().norm()
        print(
            f"{num_rows:4} {'  '.join(times)} | pdl equal bit for bit: {same}, "
            f"from cublas {error.item():.1e}",
            flush=True,
        )
        assert same, "programmatic dependent launch changed the result: a race"


def replays(graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, Tensor], x: Tensor) -> list[Tensor]:
    """Outputs of ten replays, each of other rows, from poison; the rows are as they were after."""
    before, found = x.clone(), []
    for seed in range(10):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        x.normal_(generator=generator)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        found.append(torch.cat(outputs))
    x.copy_(before)
    return found


def copy_bytes_per_s() -> float:
    source = torch.empty(2**30, device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    graph = capture(lambda: target.copy_(source))
    return 2 * source.numel() / (event_ms(graph.replay) * 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="128,64,32,256,192")
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="after which no more are swept"
    )
    parser.add_argument("--no-sweep", action="store_true", help="check and time the rule's cuts")
    arguments = parser.parse_args()
    started, rows = time.perf_counter(), [int(part) for part in arguments.rows.split(",")]
    torch.manual_seed(0)
    jobs = [] if arguments.no_sweep else swept_jobs(rows)
    with multiprocessing.get_context("spawn").Pool(NUM_COMPILERS) as pool:
        good = compile_all(pool, checked_jobs() + jobs)
        check_products()
        copy_rate = copy_bytes_per_s()
        spent = time.perf_counter() - started
        print(f"copy bandwidth {copy_rate / 1e12:.3f} TB/s; {spent:.0f} s so far", flush=True)
        swept = [job for job in good if job in jobs]
        best = sweep_all(swept, copy_rate, pool, started + arguments.seconds) if swept else {}
    torch.cuda.empty_cache()
    time_chain(rows, best, copy_rate)
    found = {f"{name} {num_rows}": str(config) for (name, num_rows), config in best.items()}
    with open(os.path.join(os.environ.get("OUT", "/tmp"), "skinny.json"), "w") as file:
        json.dump(found, file, indent=1)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
