"""From process start to the first token: a fresh process, through the engine, random weights.

    source benchmarks/card/setup.sh && python3 benchmarks/card/startup.py [--model qwen3-8b]

Runs it twice: the first finds FlashInfer's and Triton's kernels as this machine has them, the
second finds them built. Each run ends in one JSON line, in seconds; `total` begins before the
interpreter starts and holds all the others. Knows nothing of what the kernels do.
"""

import argparse
import json
import subprocess
import sys
import time

PROMPT_LEN = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", help="a published shape")
    parser.add_argument("--mode", default="fixed", choices=["off", "fixed", "adaptive"])
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--max-step-tokens", type=int, default=4096)
    parser.add_argument("--pool-gib", type=float, help="none: what the card has left")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--started-at", type=float, help="set for the process that is timed")
    return parser.parse_args()


def start_and_draw(options: argparse.Namespace) -> dict[str, float | int | str]:
    """Import, load, measure, capture, draw; seconds of each."""
    began = time.time()
    import torch

    from zipage_lang.kernels.backend import choose_backend
    from zipage_lang.runtime.config import EngineConfig
    from zipage_lang.runtime.engine import Engine
    from zipage_lang.runtime.messages import AddRequest
    from zipage_lang.runtime.sampling_params import SamplingParams

    imported = time.time()
    from zipage_lang.kernels.flashinfer_module import PagedAttentionModule
    from zipage_lang.kernels.prompt_module import PromptModule

    PagedAttentionModule(torch.bfloat16, 128)  # the engine finds them loaded
    PromptModule(torch.bfloat16, 128)
    loaded = time.time()
    choose_backend("cuda", torch.bfloat16)
    torch.cuda.synchronize()
    has_context = time.time()
    config = EngineConfig.from_options(
        model=options.model,
        load_format="dummy",
        dtype="bfloat16",
        backend="cuda",
        max_model_len=32_768,
        kv_cache_memory=options.pool_gib,
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        kv_mode=options.mode,
    )
    engine = Engine(config)
    is_ready = time.time()
    sampling = SamplingParams(max_tokens=2, temperature=0.6, ignore_eos=True)
    prompt = list(range(10, 10 + PROMPT_LEN))
    engine.handle(AddRequest(request_id="first", token_ids=prompt, sampling=sampling))
    while not engine.step():
        pass
    drawn = time.time()
    return {
        "model": options.model,
        "num_blocks": engine.limits.num_blocks,
        "interpreter": began - options.started_at,
        "imports": imported - began,
        "flashinfer": loaded - imported,
        "context": has_context - loaded,
        **engine.start_s,
        "first_token": drawn - is_ready,
        "total": drawn - options.started_at,
    }


def main() -> None:
    options = parse_arguments()
    if options.started_at is not None:
        found = start_and_draw(options)
        rounded = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in found.items()
        }
        print(json.dumps({"benchmark": "startup", **rounded}))
        return
    for _ in range(options.runs):
        command = [sys.executable, *sys.argv, "--started-at", repr(time.time())]
        subprocess.run(command, check=True, timeout=300)


main()
