"""Offline throughput on the fixed loads, on one card, with random weights of a published shape.

    python benchmarks/throughput.py --load aime --mode fixed --budget 2048

Every request of the load is there from the start; each draws exactly its number of tokens. The last
line is one JSON object. `--seconds` and `--steps` end a run early (then `is_whole` is false and the
rate is that of the part that ran); `--skip-steps` leaves the first steps out of the measurement.
Needs no tokenizer and no ZMQ: it steps the engine itself.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "card"))
from limits import Machine, bound, limit
from loads import LOADS, Load
from timing import copy_rate

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.garbage import calm_garbage_collector
from zipage_lang.runtime.messages import Abort, AddRequest
from zipage_lang.runtime.models.config import ArchConfig
from zipage_lang.runtime.sampling_params import SamplingParams

COPY_BANDWIDTH = 4.285e12  # bytes/s of one H200, measured


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=sorted(LOADS), default="aime")
    parser.add_argument("--model", default="qwen3-8b", help="a published shape")
    parser.add_argument("--mode", choices=["off", "fixed", "adaptive"], default="off")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--interval", type=int, default=256)
    parser.add_argument("--policy", default="zipage2")
    parser.add_argument("--pool-gib", type=float, default=40.0)
    parser.add_argument("--swap-gib", type=float, default=26.0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--max-step-tokens", type=int, default=4096)
    parser.add_argument("--num-query-slots", type=int)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument(
        "--no-grouping", action="store_true", help="only the attention launches that serve any step"
    )
    parser.add_argument(
        "--flashinfer-decodes", action="store_true", help="decodes, too, by FlashInfer's kernels"
    )
    parser.add_argument("--deterministic", action="store_true", help="strict mode")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--steps", type=int, help="end after this many measured steps")
    parser.add_argument("--skip-steps", type=int, default=0, help="steps before the measurement")
    parser.add_argument("--name", help="what to call the run in its JSON line")
    parser.add_argument("--commit", default=os.environ.get("ZIPAGE_COMMIT", "unknown"))
    return parser.parse_args()


def make_engine(options: argparse.Namespace) -> Engine:
    if options.no_grouping:
        switch_off_second_launches()
    if options.flashinfer_decodes:
        switch_off_own_decodes()
    config = EngineConfig.from_options(
        model=options.model,
        load_format="dummy",
        dtype="bfloat16",
        backend="cuda",
        max_model_len=32_768,
        block_size=options.block_size,
        kv_cache_memory=options.pool_gib,
        swap_space=options.swap_gib,
        prefix_caching=not options.no_prefix_cache,
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        overlap=not options.no_overlap,
        deterministic=options.deterministic,
        cuda_graphs=not options.no_graphs,
        kv_mode=options.mode,
        kv_budget=options.budget,
        evict_interval=options.interval,
        policy=options.policy,
        num_query_slots=options.num_query_slots,
    )
    return Engine(config)


def switch_off_second_launches() -> None:
    """No option of the engine: attention takes a bucket's second launch wherever that pays."""
    from zipage_lang.kernels.graph_decode import GraphDecode

    GraphDecode.can_group = GraphDecode.can_read_whole = lambda *_: False


def switch_off_own_decodes() -> None:
    """No option of the engine either: our kernel attends wherever it is made for the shape."""
    from zipage_lang.kernels.attention import FlashInferAttention

    FlashInferAttention.hopper_for = lambda *_: None


def warm_up(engine: Engine) -> None:
    """Compile and load what a first step needs, outside the measured time."""
    for index in range(2):
        sampling = SamplingParams(max_tokens=4, temperature=0.6, ignore_eos=True)
        prompt = list(range(10 + index, 300 + index))
        engine.handle(AddRequest(request_id=f"warm-{index}", token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()
    engine.scheduler.flush_cache()
    calm_garbage_collector()


def send(engine: Engine, load: Load, temperature: float) -> None:
    for index, (prompt, num_output) in enumerate(load):
        sampling = SamplingParams(
            max_tokens=num_output,
            temperature=temperature,
            ignore_eos=True,
            seed=index,
        )
        engine.handle(AddRequest(request_id=str(index), token_ids=prompt, sampling=sampling))


def run(engine: Engine, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Play the load; returns counts and times."""
    send(engine, load, options.temperature)
    for _ in range(options.skip_steps):
        engine.step()
    torch.cuda.synchronize()
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []
    num_tokens = num_finished = 0
    steps = itertools.count() if options.steps is None else iter(range(options.steps))
    before = engine.stats()
    started = time.perf_counter()
    while engine.has_work and time.perf_counter() - started < options.seconds:
        if next(steps, None) is None:
            break
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            num_tokens += len(output.token_ids)
            num_finished += output.is_final
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            first.setdefault(output.request_id, now - started)
            last[output.request_id] = now
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - started
    is_whole = not engine.has_work and options.skip_steps == 0
    after = engine.stats()
    engine.handle(Abort(request_ids=[str(index) for index in range(len(load))]))
    while engine.has_work:
        engine.step()
    gaps.sort()
    return {
        "is_whole": is_whole,
        "num_skipped_steps": options.skip_steps,
        "num_finished": num_finished,
        "num_tokens": num_tokens,
        "wall_s": wall_s,
        "tok_s": num_tokens / wall_s,
        # Of a part that starts later, the first token is not the requests' first.
        "ttft_s_median": None if options.skip_steps else statistics.median(first.values()),
        "tpot_ms_median": 1e3 * gaps[len(gaps) // 2],
        "tpot_ms_p99": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        **differences(before, after, wall_s),
    }


def differences(before: dict[str, Any], after: dict[str, Any], wall_s: float) -> dict[str, Any]:
    def gained(name: str) -> float:
        return after[name] - before[name]

    num_steps = gained("num_steps")
    return {
        "num_steps": num_steps,
        "mean_step_ms": 1e3 * wall_s / num_steps,
        "share_planning": gained("scheduling_s") / wall_s,
        "share_launching": gained("launching_s") / wall_s,
        "share_waiting": gained("waiting_s") / wall_s,
        "share_applying": gained("applying_s") / wall_s,
        "share_device_busy": gained("device_busy_s") / wall_s,
        "share_device_idle": gained("device_idle_s") / wall_s,
        "share_compaction": gained("compaction_s") / wall_s,
        "peak_held_blocks": after["peak_held"],
        "num_blocks": after["num_blocks"],
        "prefix_hit_rate": gained("num_tokens_hit") / max(1, gained("num_tokens_asked")),
        **{
            name: gained(name)
            for name in (
                "num_compactions",
                "num_early_compactions",
                "num_preemptions",
                "num_swap_outs",
                "num_swap_ins",
                "num_turns_taken",
                "num_recomputed_tokens",
                "num_prefilled_tokens",
            )
        },
    }


def num_weights_read(arch: ArchConfig) -> int:
    """Weights of all matrix products of a step; of the embedding only single rows are read."""
    heads = arch.head_dim * (2 * arch.num_q_heads + 2 * arch.num_kv_heads)
    per_layer = arch.hidden_size * (heads + 3 * arch.intermediate_size)
    return arch.num_layers * per_layer + arch.vocab_size * arch.hidden_size


def limits_of(engine: Engine, load: Load, options: argparse.Namespace) -> tuple[float, float]:
    """Output tokens per second that the memory allows, with the pool that the engine has: by the
    common formula, and by the bound that no order of the requests can beat."""
    arch = engine.arch
    machine = Machine(
        pool_tokens=engine.limits.num_blocks * options.block_size,
        weight_bytes=2 * num_weights_read(engine.arch),
        kv_bytes_per_token=4 * arch.num_layers * arch.num_kv_heads * arch.head_dim,
        bandwidth=COPY_BANDWIDTH,
    )
    budget = None if options.mode == "off" else options.budget
    return tuple(
        tokens / seconds
        for seconds, tokens in (
            limit(load, machine, budget, options.interval),
            bound(load, machine, budget, options.interval),
        )
    )


def main() -> None:
    options = parse_arguments()
    copy_bytes_per_s = copy_rate()  # cards differ by some percent
    torch.cuda.empty_cache()
    started = time.perf_counter()
    engine = make_engine(options)
    start_up_s = time.perf_counter() - started
    warm_up(engine)
    load = LOADS[options.load]()
    result = run(engine, load, options)
    memory_limit, least = limits_of(engine, load, options)
    about = {
        **({"name": options.name} if options.name else {}),
        "commit": options.commit,
        "card": torch.cuda.get_device_name(),
        "copy_bytes_per_s": copy_bytes_per_s,
        "torch": torch.__version__,
        "model": options.model,
        "load": options.load,
        "mode": options.mode,
        "policy": options.policy if options.mode != "off" else None,
        "K": options.budget if options.mode != "off" else None,
        "E": options.interval if options.mode != "off" else None,
        "block_size": options.block_size,
        "max_step_tokens": options.max_step_tokens,
        "graphs": not options.no_graphs,
        "overlap": not options.no_overlap,
        "deterministic": options.deterministic,
        "prefix_cache": not options.no_prefix_cache,
        "grouping": not options.no_grouping,
        "own_decodes": not options.flashinfer_decodes,
        "num_query_slots": engine.limits.num_query_slots,
        "start_up_s": start_up_s,
        "limit_tok_s": memory_limit,
        "share_of_limit": result["tok_s"] / memory_limit,
        "bound_tok_s": least,
        "share_of_bound": result["tok_s"] / least,
    }
    line = {**about, **result}
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}))


if __name__ == "__main__":
    main()
