"""The fixed loads that throughput is compared on, seeded and independent of any engine.

`python benchmarks/loads.py` prints each load's size and fingerprint. Knows nothing of the engine.
"""

import hashlib
import json
import random
from collections.abc import Callable

Load = list[tuple[list[int], int]]  # (prompt token ids, number of output tokens) per request

VOCABULARY = (10, 150_000)


def _prompt(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(*VOCABULARY) for _ in range(rng.randrange(low, high))]


def _sampled(seed: int, num_prompts: int, outputs: tuple[int, int], samples: int = 8) -> Load:
    """Each prompt is sampled several times; outputs are long and uneven; the order is shuffled."""
    rng = random.Random(seed)
    load: Load = []
    for _ in range(num_prompts):
        prompt = _prompt(rng, 120, 320)
        load += [(prompt, rng.randrange(outputs[0], outputs[1] + 1)) for _ in range(samples)]
    rng.shuffle(load)
    return load


def aime() -> Load:
    """192 requests, outputs of 2k to 10k tokens: reasoning at high concurrency."""
    return _sampled(seed=7, num_prompts=24, outputs=(2000, 10_000))


def aime_long() -> Load:
    """96 requests, outputs of 8k to 24k tokens: where a full KV cache runs out first."""
    return _sampled(seed=11, num_prompts=12, outputs=(8000, 24_000))


def short() -> Load:
    """256 requests, 100 to 1,024 tokens in and out: no memory pressure."""
    rng = random.Random(7)
    return [(_prompt(rng, 100, 1025), rng.randrange(100, 1025)) for _ in range(256)]


LOADS: dict[str, Callable[[], Load]] = {"aime": aime, "aime_long": aime_long, "short": short}


def fingerprint(load: Load) -> str:
    return hashlib.sha256(json.dumps(load).encode()).hexdigest()[:12]


if __name__ == "__main__":
    for name, make in LOADS.items():
        made = make()
        total = sum(num_output for _, num_output in made)
        print(f"{name}: {len(made)} requests, {total} output tokens, {fingerprint(made)}")
