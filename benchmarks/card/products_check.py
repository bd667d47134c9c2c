"""Are the Hopper products right: odd rows and shapes, every cut, order in a graph.

    python3 benchmarks/card/products_check.py

Knows nothing of speed.
"""

import random
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from timing import capture
from torch import Tensor

from zipage_lang.kernels.hopper.choose import ranked_configs
from zipage_lang.kernels.hopper.library import clusters_held
from zipage_lang.kernels.hopper.linear import HopperLinear

ROWS = (1, 3, 8, 17, 64, 100, 128, 129, 191, 192, 223, 256)
EPS = 1e-6
# name: (out_size, in_size, gated, with bias)
SHAPES = {
    "qkv 8B": (6144, 4096, False, False),
    "o 8B": (4096, 4096, False, False),
    "gate_up 8B": (24576, 4096, True, False),
    "down 8B": (4096, 12288, False, False),
    "qkv 0.6B bias": (4096, 1024, False, True),
    "o 0.6B": (1024, 2048, False, False),
    "gate_up 0.6B bias": (6144, 1024, True, True),
    "qkv 14B": (7168, 5120, False, False),
    "odd": (1088, 704, False, True),
    "odd gated": (320, 192, True, False),
    "one tile": (64, 64, False, False),
}
Run = Callable[[HopperLinear, Tensor, Tensor, Any], list[Tensor]]
MAX_CONFIGS = 5  # cuts of each (shape, rows) beside the chosen one
CHECK_S = 28  # then no new case starts


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """float64, from the weight as the model has it."""
    out = x.double() @ weight.double().T
    if bias is not None:
        out += bias.double()
    if gated:
        gate, up = out.chunk(2, dim=1)
        out = torch.nn.functional.silu(gate) * up
    return out


def worst(out: Tensor, reference: Tensor) -> float:
    """Largest error over what bfloat16's last place and a float32 sum allow; at most 1 is right."""
    allowed = reference.abs() * 2**-8 + 1e-4
    error = (out.double() - reference).abs() / allowed
    return float("inf") if error.isnan().any() else error.max().item()


def poison(like: Tensor) -> None:
    """Leaves NaN in the memory that the next output of this size will probably get."""
    torch.full_like(like, float("nan"))


def cases_of(product: HopperLinear, num_rows: int, run: Run, choice: random.Random) -> list[Any]:
    """Cuts to try; None is the chosen one."""
    ranked = ranked_configs(num_rows, *product.weight.shape, clusters_held(), adds=run is added)
    return [None, *choice.sample(ranked, min(MAX_CONFIGS, len(ranked)))]


def plain(product: HopperLinear, x: Tensor, residual: Tensor, config: Any) -> list[Tensor]:
    return [product(x, config)]


def normed(product: HopperLinear, x: Tensor, residual: Tensor, config: Any) -> list[Tensor]:
    """Squares in 5 parts, of which the sum counts."""
    parts = x.float().square().tensor_split(5, dim=1)
    return [product.normed(x, torch.stack([part.sum(1) for part in parts]), EPS, config)]


def added(product: HopperLinear, x: Tensor, residual: Tensor, config: Any) -> list[Tensor]:
    """With what the squares say that the stream's rms is, beside what it is."""
    total, squares = product.add(x, residual, config)
    true = total.float().square().sum(1)
    if not ((squares.sum(0) - true).abs() <= 1e-5 * true).all():
        total.fill_(float("nan"))
    return [total, squares]


def check_shape(name: str, run: Run, deadline: float) -> tuple[int, int, float]:
    out_size, in_size, gated, with_bias = SHAPES[name]
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    choice = random.Random(seed)
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(out_size, in_size, **kinds) * in_size**-0.5
    bias = torch.randn(out_size, **kinds) if with_bias else None
    xs = torch.randn(max(ROWS), in_size, **kinds)
    residuals = torch.randn(max(ROWS), out_size, **kinds) * 4
    inputs = xs.double()
    if run is normed:
        inputs = inputs * (inputs.square().mean(1, keepdim=True) + EPS).rsqrt()
    reference = expected(inputs, weight, bias, gated)
    if run is added:
        reference += residuals.double()
    product = HopperLinear.prepare(weight, bias, gated)
    num_run, num_wrong, largest = 0, 0, 0.0
    for num_rows in ROWS:
        x, residual = xs[:num_rows].clone(), residuals[:num_rows].clone()
        for label in cases_of(product, num_rows, run, choice):
            if time.perf_counter() > deadline:
                print(f"  {name}: out of time at {num_rows} rows")
                return num_run, num_wrong, largest
            try:
                first = run(product, x, residual, label)
                for one in first:
                    poison(one)
                again = run(product, x, residual, label)
            except RuntimeError as error:
                if "CUDA error" in str(error) or "code 7" in str(error):
                    raise
                print(f"  {name} {run.__name__} rows={num_rows} {label}: {error}")
                num_wrong += 1
                continue
            error = worst(again[0], reference[:num_rows])
            same = all(torch.equal(*pair) for pair in zip(first, again, strict=True))
            num_run, largest = num_run + 1, max(largest, error)
            if error > 1 or not same:
                num_wrong += 1
                if num_wrong <= 6:
                    where = (again[0].double() - reference[:num_rows]).abs().argmax().item()
                    row, column = divmod(where, again[0].shape[1])
                    print(
                        f"  WRONG {name} {run.__name__} rows={num_rows} {label}: error {error:.3g}"
                        f" of allowed at [{row}, {column}], same twice {same}, seed {seed}"
                    )
    return num_run, num_wrong, largest


def check_order(num_rows: int) -> None:
    """A graph in which every product reads what the kernel just before it wrote, replayed often."""
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, inner, num_layers = 1024, 3072, 6
    ups, downs = [], []
    for _ in range(num_layers):
        up = torch.randn(2 * inner, hidden, **kinds) / hidden**0.5
        ups.append(HopperLinear.prepare(up, None, True))
        down = torch.randn(hidden, inner, **kinds) / inner**0.5
        downs.append(HopperLinear.prepare(down, None))
    source, x = torch.randn(num_rows, hidden, **kinds), torch.empty(num_rows, hidden, **kinds)
    other = torch.randn(8192, 8192, **kinds)

    def work(between: Callable[[], object]) -> Tensor:
        x.fill_(float("nan"))
        other.add_(0.0)  # slow, so that whoever does not wait for its predecessor reads NaN
        x.copy_(source)
        residual, squares = x, x.float().square().sum(1)[None]
        for up, down in zip(ups, downs, strict=True):
            fed = up.normed(residual, squares, EPS)
            between()
            residual, squares = down.add(fed, residual)
            between()
        return residual

    with_waits = work(torch.cuda.synchronize).clone()
    holder: list[Tensor] = []
    graph = capture(lambda: holder.append(work(lambda: None)))
    wrong = 0
    for _ in range(30):
        graph.replay()
        wrong += not torch.equal(holder[-1], with_waits)
    bad = with_waits.isnan().any().item()
    print(f"  graph order, {num_rows} rows: {wrong} of 30 replays differ, NaN {bad}")


def every_case() -> list[tuple[str, Run]]:
    """Small shapes first, so that a shape of a model finds them right."""
    cases = [(name, run) for name in SHAPES for run in (plain, normed, added)]
    allowed = [case for case in cases if not (case[1] is added and SHAPES[case[0]][2])]
    return sorted(allowed, key=lambda case: SHAPES[case[0]][0] * SHAPES[case[0]][1])


def main() -> None:
    started = time.perf_counter()
    print("right?")
    deadline = started + CHECK_S
    for num_rows in (8, 128, 192, 256):
        try:
            check_order(num_rows)
        except Exception:
            traceback.print_exc()
            return
    for name, run in every_case():
        try:
            num_run, num_wrong, largest = check_shape(name, run, deadline)
            print(
                f"  {name} {run.__name__}: {num_run} runs, {num_wrong} wrong,"
                f" error {largest:.2f} of allowed"
            )
        except Exception:
            traceback.print_exc()
            if "CUDA" in traceback.format_exc():
                return
    print(f"  {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
