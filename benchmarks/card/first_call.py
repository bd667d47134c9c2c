"""First look at a card, as one JSON: what it is, what it reaches, if the engine is right on it.

    python3 first_call.py --out FOLDER [stage ...]

Every stage runs on its own: one that fails prints its traceback and the next goes on.
"""

import argparse
import gc
import json
import subprocess
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timing
import torch
from timing import capture, event_ms

Report = dict[str, Any]


def environment(report: Report) -> None:
    started = time.perf_counter()
    import flashinfer

    report["flashinfer_import_s"] = time.perf_counter() - started
    card = torch.cuda.get_device_properties(0)
    report["card"] = {
        "name": card.name,
        "sms": card.multi_processor_count,
        "l2": card.L2_cache_size,
    }
    names = ("torch", "triton", "apache-tvm-ffi", "transformers", "numpy")
    report["versions"] = {name: version(name) for name in names}
    report["versions"]["flashinfer"] = flashinfer.__version__
    print(json.dumps(report, indent=1))
    free, total = torch.cuda.mem_get_info()
    print(f"memory free {free / 2**30:.1f} of {total / 2**30:.1f} GiB")
    print(
        subprocess.run(["nproc"], capture_output=True, text=True, check=False).stdout.strip(),
        "cores",
    )


def ceilings(report: Report) -> None:
    measure_copy(report)
    measure_matmul(report)


def copy_rate(report: Report) -> float:
    if "copy_bytes_per_s" not in report:
        measure_copy(report)
    return float(report["copy_bytes_per_s"])


def measure_copy(report: Report) -> None:
    report["copy_bytes_per_s"] = timing.copy_rate()
    print(f"copy {report['copy_bytes_per_s'] / 1e12:.3f} TB/s")


def measure_matmul(report: Report) -> None:
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ms = event_ms(lambda: a @ b)
    report["matmul_tflops"] = 2 * 8192**3 / (ms / 1e3) / 1e12
    print(f"matmul {report['matmul_tflops']:.0f} TFLOP/s")


def products(report: Report) -> None:
    """Qwen3-8B's weights times a batch of decodes; copies of each are rotated past the L2."""
    copy = copy_rate(report)
    shapes = {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
        "head": (151936, 4096),
    }
    for num_rows in (1, 32, 64, 128, 192, 256):
        total_ms = floor_ms = 0.0
        line = []
        for name, (out_size, in_size) in shapes.items():
            num_copies = max(2, 2**30 // (out_size * in_size * 2))
            weights = [
                torch.randn(out_size, in_size, dtype=torch.bfloat16, device="cuda")
                for _ in range(num_copies)
            ]
            x = torch.randn(num_rows, in_size, dtype=torch.bfloat16, device="cuda")

            def work(x=x, weights=weights):
                for weight in weights:
                    torch.nn.functional.linear(x, weight)

            ms = event_ms(capture(work).replay, repeats=5) / num_copies
            floor = weights[0].nbytes / copy * 1e3
            times = 1 if name == "head" else 36
            total_ms, floor_ms = total_ms + times * ms, floor_ms + times * floor
            line.append(f"{name} {ms * 1e3:.1f} us ({floor / ms:.0%})")
            del weights
        print(f"products, {num_rows} rows: {total_ms:.2f} ms of {floor_ms:.2f}: {', '.join(line)}")
        report[f"products {num_rows} rows"] = {"ms": total_ms, "floor_ms": floor_ms, "each": line}


def attention_right(report: Report) -> None:
    from attention_check import check_eager, check_float32, check_graphs

    for check in (check_eager, check_float32, check_graphs):
        guarded(check.__name__, check, report)


def attention_fast(report: Report) -> None:
    from attention_check import time_decode, time_mixed

    copy = copy_rate(report)
    guarded("time_decode", lambda r: time_decode(r, copy), report)
    guarded("time_mixed", time_mixed, report)


def engine_equal(report: Report) -> None:
    from engine_check import compare_backends

    compare_backends(report)


def model_step(report: Report) -> None:
    from model_step import time_model

    time_model(report, copy_rate(report))


STAGES: dict[str, Callable[[Report], None]] = {
    "environment": environment,
    "ceilings": ceilings,
    "attention_right": attention_right,
    "engine_equal": engine_equal,
    "attention_fast": attention_fast,
    "model_step": model_step,
    "products": products,
}


def guarded(name: str, stage: Callable[[Report], None], report: Report) -> None:
    started = time.perf_counter()
    try:
        stage(report)
        torch.cuda.synchronize()
    except Exception:  # the next stage must still run
        report.setdefault("failed", []).append(name)
        print(f"FAILED {name}\n{traceback.format_exc()}")
    seconds = time.perf_counter() - started
    report.setdefault("seconds", {})[name] = round(seconds, 1)
    print(f"--- {name}: {seconds:.1f} s")
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; none: all")
    options = parser.parse_args()
    report: Report = {}
    for name in options.stages or STAGES:
        guarded(name, STAGES[name], report)
        path = options.out / f"{'-'.join(options.stages) or 'all'}.json"
        path.write_text(json.dumps(report, indent=1))
    print("failed:", report.get("failed", []), "wrong:", report.get("wrong", []))


main()
