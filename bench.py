"""Throughput on this machine: our engine side by side with transformers' generate, and with itself.

    python bench.py                          all: against transformers, and a budget against full KV
    python bench.py --batch 8 --repeats 5    only that batch, against transformers
    python bench.py --budget 128 --max-tokens 1500 --batch 8    a KV budget against full KV

Each run prints one JSON line; the last lines are ratios (median, lowest, highest of the repeats).
The runs that are compared alternate, in one process each, with the same model, dtype and threads.
"""

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import zipage_lang as zipage
from zipage_lang.commands.bench_load import Job, make_job, run_job
from zipage_lang.commands.machine import machine_name

PROMPT_LEN = 64
VOCAB_SIZE = 40_000  # of the tokens that prompts are drawn from


class OurEngine:
    """Our engine in its own process, as users run it."""

    name = "zipage"

    def __init__(self, options: argparse.Namespace) -> None:
        self._engine = zipage.Engine(
            options.model,
            dtype=options.dtype,
            num_threads=options.threads,
            kv_cache_memory=options.kv_cache_memory,
            policy=options.policy,
        )

    def run(self, job: Job) -> dict[str, Any]:
        return run_job(self._engine, job)

    def close(self) -> None:
        self._engine.close()


class Transformers:
    """transformers' generate with its default cache, reading the same model."""

    name = "transformers"

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(options.threads)
        self._torch = torch
        self._model = load_in_transformers(options.model, getattr(torch, options.dtype))

    def run(self, job: Job) -> dict[str, Any]:
        ids = self._torch.tensor(job.prompts)
        started = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=job.max_tokens,
                min_new_tokens=job.max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[1] == PROMPT_LEN + job.max_tokens, out.shape
        return {"mode": "off", "wall_s": time.perf_counter() - started}

    def close(self) -> None:
        del self._model


def load_in_transformers(model: str, dtype: Any) -> Any:
    """The model as transformers reads it, from a folder or a GGUF file."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from zipage_lang.runtime.model_store import resolve_model

    path = resolve_model(model)
    if path.suffix != ".gguf":
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False
        ).eval()
    config = transformers.AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, trust_remote_code=False
    )
    loaded = transformers.AutoModelForCausalLM.from_config(config).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=loaded)["tensors"]
    loaded.load_state_dict(tensors, strict=False)
    return loaded.to(dtype)


def job_of(batch: int, max_tokens: int, kv: zipage.KV) -> Job:
    return make_job(batch, max_tokens, kv, prompt_len=PROMPT_LEN, vocab_size=VOCAB_SIZE)


def describe(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "machine": machine_name(),
        "threads": options.threads,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "model": options.model,
        "dtype": options.dtype,
    }


def alternate(
    contestants: list[tuple[str, Callable[[], dict[str, Any]]]],
    repeats: int,
    job: Job,
    about: dict[str, Any],
) -> None:
    """Run the two in turn, print each run's JSON line, then the ratio first / second."""
    walls: dict[str, list[float]] = {name: [] for name, _ in contestants}
    for _ in range(repeats):
        for name, run in contestants:
            result = run()
            walls[name].append(result["wall_s"])
            line = {**about, "engine": name, "batch": job.batch, "max_tokens": job.max_tokens}
            rate = {"tok_s": job.num_tokens / result["wall_s"]}
            print(json.dumps({**line, **rate, **rounded(result)}), flush=True)
    ours, theirs = walls.values()
    ratios = [their_s / our_s for our_s, their_s in zip(ours, theirs, strict=True)]
    print(
        f"batch {job.batch}, {job.max_tokens} new tokens: {contestants[0][0]} is "
        f"{statistics.median(ratios):.2f} x {contestants[1][0]} "
        f"(lowest {min(ratios):.2f}, highest {max(ratios):.2f}, {repeats} runs each)",
        flush=True,
    )


def rounded(result: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}


def against_transformers(
    options: argparse.Namespace, ours: OurEngine, about: dict[str, Any], batches: list[int]
) -> None:
    theirs = Transformers(options)
    for batch in batches:
        job = job_of(batch, options.max_tokens or 256, zipage.KV(mode="off"))
        short = job_of(batch, 8, zipage.KV(mode="off"))
        for who in (ours, theirs):
            who.run(short)  # warm-up
        pair = [(who.name, functools.partial(who.run, job)) for who in (ours, theirs)]
        alternate(pair, options.repeats, job, about)
    theirs.close()


def against_full_kv(options: argparse.Namespace, ours: OurEngine, about: dict[str, Any]) -> None:
    batch, max_tokens = (options.batch or [8])[0], options.max_tokens or 1500
    bounded_kv = zipage.KV(mode="fixed", budget=options.budget or 128, interval=options.interval)
    bounded = job_of(batch, max_tokens, bounded_kv)
    full = job_of(batch, max_tokens, zipage.KV(mode="off"))
    ours.run(job_of(batch, 8, bounded_kv))  # warm-up
    pair = [
        (f"budget {bounded_kv.budget}", functools.partial(ours.run, bounded)),
        ("full KV", functools.partial(ours.run, full)),
    ]
    alternate(pair, options.repeats, bounded, about)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="*")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--budget", type=int, help="compare this KV budget with full KV")
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--policy", default="zipage2")
    parser.add_argument("--kv-cache-memory", type=float, default=2.0, help="GiB")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    about = describe(options)
    ours = OurEngine(options)
    try:
        if options.budget is None:
            against_transformers(options, ours, about, options.batch or [1, 8, 16])
        if options.budget is not None or options.batch is None:
            against_full_kv(options, ours, about)
    finally:
        ours.close()


if __name__ == "__main__":
    main()
