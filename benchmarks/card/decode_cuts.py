"""How the products of a decode step are cut best, measured inside the step's own CUDA graph.

    python3 benchmarks/card/decode_cuts.py [seconds] [ROWSxSLOTS ...]

One product after the other, the cut that makes the whole step fastest; then the chosen cuts and
those in `kernels/hopper/choose.py` in turn, captured twice each, since two captures of one thing
differ by up to 0.1 ms. Between attention and norms a product has other neighbours than among
products alone (`products.py sweep`), and other cuts win. How many clusters a card holds differs
from card to card: look at more than one. Qwen3-8B shapes. Knows nothing of the engine.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from model_step import DecodeModel, DecodeStep
from timing import copy_rate, event_ms

from zipage_lang.kernels import products as card_products
from zipage_lang.kernels.hopper import choose
from zipage_lang.kernels.hopper.library import clusters_held

Cut = tuple[int, int, int]  # groups, splits, sharers

SHAPES = {
    "qkv": (6144, 4096),
    "down": (4096, 12288),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "head": (151936, 4096),
}
ADDING = ("o", "down")
STEPS = ((64, 2304), (128, 2304), (96, 2304), (192, 1390), (160, 1390), (32, 2304), (16, 2304))
# Of the cuts as the rule in `choose.py` ranks them; where arithmetic binds it ranks them badly.
NUM_TRIED, NUM_TRIED_OF_MANY = 12, 32
MANY_ROWS = 161
CUBLAS_ROWS = 128  # with fewer cuBLAS was never close
LARGEST = (128, 2304)
LEAST_GAIN_MS = 0.02


class Cuts:
    """What `choose.py` holds, and what is put in its place."""

    def __init__(self) -> None:
        self._measured, self._lost = dict(choose.MEASURED), choose.CUBLAS_IS_FASTER

    def usual(self, num_rows: int) -> dict[str, Cut | None]:
        """Those of a step as they stand in the file."""
        self.use(num_rows, {})
        cuts: dict[str, Cut | None] = {}
        for name, shape in SHAPES.items():
            config = choose.choose_config(num_rows, *shape, clusters_held(), adds=name in ADDING)
            cuts[name] = tuple(config) if choose.beats_cublas(num_rows, *shape) else None
        return cuts

    def use(self, num_rows: int, cuts: dict[str, Cut | None]) -> None:
        """From now on, for products of so many rows."""
        rows = choose.padded_rows(num_rows)
        places = {name: (rows, *SHAPES[name]) for name in cuts}
        kept = {places[name]: cut for name, cut in cuts.items() if cut is not None}
        choose.MEASURED.clear()
        choose.MEASURED.update({**self._measured, **kept})
        lost = {places[name] for name, cut in cuts.items() if cut is None}
        choose.CUBLAS_IS_FASTER = (self._lost - set(kept)) | lost
        choose.choose_config.cache_clear()


def step_ms(step: DecodeStep, cuts: Cuts, tried: dict[str, Cut | None]) -> float:
    """Of one capture; infinite where a cut would not be used, or no kernel is built for it."""
    cuts.use(step.num_rows, tried)
    for name, cut in tried.items():
        config = choose.choose_config(
            step.num_rows, *SHAPES[name], clusters_held(), adds=name in ADDING
        )
        if cut is not None and config != cut:
            return float("inf")
    try:
        graph, _ = step.captured()
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise
        return float("inf")
    return min(event_ms(graph.replay, 5, 1) for _ in range(2))


def candidates(num_rows: int, name: str) -> list[Cut | None]:
    """What may be best; None is cuBLAS."""
    count = NUM_TRIED_OF_MANY if num_rows >= MANY_ROWS else NUM_TRIED
    ranked = choose.ranked_configs(num_rows, *SHAPES[name], clusters_held(), adds=name in ADDING)
    found: list[Cut | None] = [tuple(config) for config in ranked[:count]]
    return [*found, None] if num_rows >= CUBLAS_ROWS else found


def search(step: DecodeStep, cuts: Cuts) -> dict[str, Cut | None]:
    """The best cuts, one product after the other."""
    best = cuts.usual(step.num_rows)
    best_ms, tries = step_ms(step, cuts, best), []
    for name in (*SHAPES, "qkv"):
        for cut in candidates(step.num_rows, name):
            if cut == best[name]:
                continue
            ms = step_ms(step, cuts, {**best, name: cut})
            tries.append(f"{name} {cut} {ms - best_ms:+.3f}")
            if ms < best_ms - LEAST_GAIN_MS:
                best, best_ms = {**best, name: cut}, ms
    print("   ", *tries, sep="  ")
    return best


def compare(step: DecodeStep, cuts: Cuts, found: dict[str, Cut | None]) -> tuple[float, float]:
    """Milliseconds with the file's cuts and with those found: two captures of each, in turns."""
    usual, graphs = cuts.usual(step.num_rows), []
    for tried in (usual, found, usual, found):
        cuts.use(step.num_rows, tried)
        graphs.append(step.captured()[0])
    times = defaultdict(list)
    for _ in range(4):
        for index, graph in enumerate(graphs):
            times[index % 2].append(event_ms(graph.replay, 5, 1))
    return statistics.median(times[0]), statistics.median(times[1])


def report(step: DecodeStep, cuts: Cuts, floor_ms: float) -> dict[str, Any]:
    """What was found for one number of rows."""
    print(f"{step.num_rows} rows of {step.kv_len}, tries in ms against the best:")
    found, usual = search(step, cuts), cuts.usual(step.num_rows)
    before, after = compare(step, cuts, found)
    return {
        "rows": choose.padded_rows(step.num_rows),
        "kv_len": step.kv_len,
        "floor_ms": round(floor_ms, 3),
        "before_ms": round(before, 3),
        "after_ms": round(after, 3),
        "changed": {name: cut for name, cut in found.items() if cut != usual[name]},
    }


def main() -> None:
    limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else 90
    asked = [tuple(map(int, word.split("x"))) for word in sys.argv[2:]]
    started, copy = time.perf_counter(), copy_rate()
    print(f"copy {copy / 1e12:.3f} TB/s; clusters held, by size from 0: {clusters_held()}")
    print(f"norms apart at {card_products.ROWS_NORMED_APART} rows", flush=True)
    model, cuts = DecodeModel("qwen3-8b", *LARGEST), Cuts()
    with torch.inference_mode():
        for num_rows, kv_len in asked or STEPS:
            if time.perf_counter() - started > limit_s:
                break
            step = DecodeStep(model, num_rows, kv_len)
            floor_ms = model.floor_ms(num_rows, kv_len, copy)
            print(json.dumps(report(step, cuts, floor_ms)), flush=True)


if __name__ == "__main__":
    main()
