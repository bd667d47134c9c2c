"""How fast long prompts are computed: chunks of a step each, one request after the other.

    python3 benchmarks/card/long_prompts.py [--length 16384] [--general]

With `--general` FlashInfer's general kernel attends, not the one for Hopper. Ends in one JSON
line: tokens a second over all prompts but the first. Knows nothing of what the kernels do.
"""

import argparse
import json
import time

from zipage_lang.kernels import attention
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

NUM_PROMPTS = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", help="a published shape")
    parser.add_argument("--length", type=int, default=16_384, help="tokens of a prompt")
    parser.add_argument("--max-step-tokens", type=int, default=4096)
    parser.add_argument("--general", action="store_true")
    return parser.parse_args()


def make_engine(options: argparse.Namespace) -> Engine:
    return Engine(
        EngineConfig.from_options(
            model=options.model,
            load_format="dummy",
            dtype="bfloat16",
            backend="cuda",
            max_model_len=options.length + 8,
            kv_cache_memory=20.0,
            max_running=8,
            max_step_tokens=options.max_step_tokens,
            kv_mode="off",
        )
    )


def seconds_to_first_token(engine: Engine, index: int, length: int) -> float:
    """Of a prompt that shares nothing with those before."""
    prompt = [10 + (index * length + place) % 100_000 for place in range(length)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.handle(AddRequest(request_id=str(index), token_ids=prompt, sampling=sampling))
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def main() -> None:
    options = parse_arguments()
    if options.general:
        attention.is_for_hopper = lambda *_: False
    engine = make_engine(options)
    times = [seconds_to_first_token(engine, i, options.length) for i in range(NUM_PROMPTS + 1)][1:]
    report = {
        "length": options.length,
        "for_hopper": not options.general,
        "seconds": [round(seconds, 4) for seconds in times],
        "tok_s": round(NUM_PROMPTS * options.length / sum(times), 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
