"""What a started engine still compiles once requests come: nothing, if its start did its work.

    source benchmarks/card/setup.sh && python3 benchmarks/card/first_requests.py

Requests of one kind after the other, each kind for the first time. Ends in one JSON line: Triton
kernels compiled (or loaded, where the disk has them) by kind of request, and each kind's slowest
step in milliseconds. Run it in a process of its own: kernels stay loaded. Knows nothing of what
the kernels do.
"""

import argparse
import json
import time
from typing import Any

import triton

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": 0.6}],
    "top-p": [{"top_p": 0.95}],
    "top-k": [{"top_k": 20}],
    "min-p": [{"min_p": 0.05}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 5}],
    "penalties": [{"repetition_penalty": 1.1, "presence_penalty": 0.5}],
    "bias": [{"logit_bias": {7: 2.0}}],
    "samples": [{"n": 3}],
    "many samples": [{"n": 24}],
    "mixed": [{"temperature": 0.0}, {"top_p": 0.9}, {"n": 2}, {"repetition_penalty": 1.2}],
    "compacted": [{"max_tokens": 700}, {"max_tokens": 600, "temperature": 0.0}],
    "long prompts": [{"prompt_len": 1500}, {"prompt_len": 700}],
    "many": [{"max_tokens": 40}] * 24,
    "short of memory": [{"max_tokens": 500}] * 32,
}
PROMPT_LEN = 40


def make_engine(model: str) -> Engine:
    return Engine(
        EngineConfig.from_options(
            model=model,
            load_format="dummy",
            dtype="bfloat16",
            backend="cuda",
            max_model_len=4096,
            kv_cache_memory=1.0,  # too little for 32 long ones: they take turns
            swap_space=2.0,
            max_running=32,
            max_step_tokens=512,
            kv_mode="fixed",
            kv_budget=256,
            evict_interval=64,
        )
    )


def slowest_step_ms(engine: Engine, kind: str) -> float:
    """Of all requests of a kind, from their coming to the last one's end."""
    for index, asked in enumerate(KINDS[kind]):
        usual = {"max_tokens": 8, "ignore_eos": True, "seed": index, "prompt_len": PROMPT_LEN}
        settings = {**usual, **asked}
        prompt_len = settings.pop("prompt_len")
        sampling = SamplingParams(**settings)
        prompt = [10 + index * prompt_len + place for place in range(prompt_len)]
        message = AddRequest(request_id=f"{kind}-{index}", token_ids=prompt, sampling=sampling)
        engine.handle(message)
    slowest = 0.0
    while engine.has_work:
        started = time.perf_counter()
        for output in engine.step():
            assert output.error is None, output.error
        slowest = max(slowest, time.perf_counter() - started)
    return 1e3 * slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a published shape")
    engine = make_engine(parser.parse_args().model)
    compiled: list[str] = []

    def note(*, fn: Any, **_: object) -> None:
        compiled.append(fn.name)

    triton.knobs.runtime.jit_post_compile_hook = note
    slowest_ms, by_kind = {}, {}
    for kind in KINDS:
        slowest_ms[kind] = round(slowest_step_ms(engine, kind), 1)
        by_kind[kind] = sorted(set(compiled))
        compiled.clear()
    assert engine.stats()["num_swap_ins"] > 0, "memory was not short"
    print(json.dumps({"compiled": by_kind, "slowest_step_ms": slowest_ms}))


if __name__ == "__main__":
    main()
