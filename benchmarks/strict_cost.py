"""What strict mode (`--deterministic`) costs on a CPU: the same work without and with it, in turns.

    python benchmarks/strict_cost.py [--model smollm2-135m] [--dtype float32] [--rounds 5]

Two engines over the same weights; each round runs the load on one and then on the other, so that
whatever else the machine does hits both. Prints per load both medians, their spread (least to most)
and the ratio, and last one JSON object. Knows nothing of cards: see `benchmarks/card/strict.sh`.
"""

import argparse
import json
import random
import statistics
import time

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

FIXED = KVParams(mode="fixed", budget=64, interval=32, policy="zipage")
# Requests at once, prompt tokens, tokens drawn, how the cache is bounded
LOADS = {
    "one decode": (1, 16, 32, None),
    "one long decode": (1, 500, 17, None),
    "16 decodes": (16, 16, 32, None),
    "prefill of 512": (1, 512, 1, None),
    "8 bounded": (8, 16, 160, FIXED),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    return parser.parse_args()


def make_engine(options: argparse.Namespace, deterministic: bool) -> Engine:
    return Engine(
        EngineConfig.from_options(
            model=options.model,
            load_format=options.load_format,
            dtype=options.dtype,
            backend="cpu",
            num_threads=options.threads,
            num_blocks=600,
            prefix_caching=False,
            deterministic=deterministic,
        )
    )


def seconds_of(engine: Engine, load: str, turn: int) -> float:
    """One run of the load, from the first step to the last."""
    num_requests, prompt_len, num_tokens, kv = LOADS[load]
    rng = random.Random(turn)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(num_requests):
        prompt = [rng.randrange(engine.limits.vocab_size) for _ in range(prompt_len)]
        name = f"{load}-{turn}-{index}"
        engine.handle(AddRequest(request_id=name, token_ids=prompt, sampling=sampling, kv=kv))
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    engine.step()
    return time.perf_counter() - started


def in_turns(engines: list[Engine], load: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round on either engine, which take turns at going first."""
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(-1, rounds):  # the first warms up
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds = seconds_of(engines[which], load, turn)
            if turn >= 0:
                found[which].append(seconds)
    return found


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):7.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def main() -> None:
    options = parse_arguments()
    engines = [make_engine(options, deterministic) for deterministic in (False, True)]
    found: dict[str, tuple[list[float], list[float]]] = {}
    ratios = {}
    for load in options.loads:
        usual, strict = found[load] = in_turns(engines, load, options.rounds)
        ratios[load] = statistics.median(b / a for a, b in zip(usual, strict, strict=True))
        print(
            f"{load:<16} usual {spread(usual)}   strict {spread(strict)}   "
            f"{ratios[load]:.2f} times as long (median of the rounds' ratios)",
            flush=True,
        )
    print(
        json.dumps(
            {
                "model": options.model,
                "dtype": options.dtype,
                "threads": options.threads,
                "rounds": options.rounds,
                "strict_over_usual": ratios,
                "seconds": {load: {"usual": a, "strict": b} for load, (a, b) in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
