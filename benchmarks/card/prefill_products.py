"""What cuBLAS sustains at the sizes of prefill, with the card's clock and power while it does.

    python3 benchmarks/card/prefill_products.py

Each product of a layer of Qwen3-8B for most of a second, eight weights in turn, random and zero: a
card at its power limit lowers its clock, which a short measurement does not see. Ends in one JSON
line. Knows nothing of the engine.
"""

import json
import subprocess
import threading
import time
from typing import Any

import torch
from torch import Tensor

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ROWS = (512, 2048, 4096, 4096 + 128, 8192)
ROWS_OF_ZEROS = (4096,)
NUM_WEIGHTS = 8
SECONDS = 0.7
LAUNCHES = 64  # between two looks at the clock


def card_state() -> tuple[int, float]:
    """MHz of the multiprocessors, and watts."""
    asked = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw"]
    told = subprocess.run(
        [*asked, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    mhz, watts = told.stdout.strip().split(",")
    return int(mhz), float(watts)


def sustained(x: Tensor, weights: list[Tensor], out: Tensor) -> tuple[float, int, float]:
    """Microseconds of one product, then the card's state in the middle of all."""
    state: list[tuple[int, float]] = []

    def look() -> None:
        time.sleep(0.6 * SECONDS)
        state.append(card_state())

    looking = threading.Thread(target=look)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    num_products = 0
    looking.start()
    began = time.perf_counter()
    start.record()
    while time.perf_counter() - began < SECONDS:
        for _ in range(LAUNCHES):
            torch.mm(x, weights[num_products % NUM_WEIGHTS].t(), out=out)
            num_products += 1
        torch.cuda.synchronize()
    end.record()
    end.synchronize()
    looking.join()
    return start.elapsed_time(end) / num_products * 1e3, *state[0]


def measure(is_random: bool, num_rows: int) -> list[dict[str, Any]]:
    make = torch.randn if is_random else torch.zeros
    kinds: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows = []
    for name, (out_size, in_size) in SHAPES.items():
        scale = in_size**-0.5
        weights = [make(out_size, in_size, **kinds) * scale for _ in range(NUM_WEIGHTS)]
        x, out = make(num_rows, in_size, **kinds), torch.empty(num_rows, out_size, **kinds)
        us, mhz, watts = sustained(x, weights, out)
        rate = round(2 * num_rows * out_size * in_size / us / 1e6)
        data = "normal" if is_random else "zeros"
        print(f"{data:6s} {num_rows:5d} {name:8s} {us:7.1f} us {rate} TFLOP/s {mhz} MHz {watts} W")
        found = {"data": data, "rows": num_rows, "product": name, "us": round(us, 1)}
        rows.append({**found, "tflop_s": rate, "mhz": mhz, "watt": watts})
    return rows


def main() -> None:
    products = [row for num_rows in ROWS for row in measure(True, num_rows)]
    products += [row for num_rows in ROWS_OF_ZEROS for row in measure(False, num_rows)]
    print(json.dumps({"benchmark": "cublas_sustained", "products": products}))


if __name__ == "__main__":
    main()
