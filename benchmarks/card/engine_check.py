"""The whole engine on the card against the CPU backend: same tiny weights, same prompts, greedy.

Knows nothing of speed.
"""

import json
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from zipage_lang.kernels.cuda_backend import CudaBackend
from zipage_lang.kernels.reference import (
    compact,
    fused_ops,
    kv_store,
    sampling,
    scores,
    select,
)
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.models.dummy import RandomWeights, weight_shapes
from zipage_lang.runtime.models.qwen3 import read_config
from zipage_lang.runtime.sampling_params import SamplingParams

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 997,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 996,
}
WEIGHT_STD = 0.12  # large enough that the likeliest token stands out
MODES: dict[str, dict[str, Any]] = {
    "off": {"kv_mode": "off"},
    "fixed": {"kv_mode": "fixed", "kv_budget": 48, "evict_interval": 16, "policy": "zipage"},
}


TWINS = {
    module.__name__.rsplit(".", 1)[-1]: module
    for module in (fused_ops, kv_store, sampling, scores, select, compact)
}


@contextmanager
def twins_for(groups: tuple[str, ...]) -> Iterator[None]:
    """The cuda backend with the torch twins in place of some groups of Triton kernels."""
    kept = {}
    for group in groups:
        for name, twin in vars(TWINS[group]).items():
            if name in vars(CudaBackend) and callable(twin):
                kept[name] = vars(CudaBackend)[name]
                setattr(CudaBackend, name, staticmethod(twin))
    try:
        yield
    finally:
        for name, kernel in kept.items():
            setattr(CudaBackend, name, kernel)


def write_model(folder: Path) -> None:
    arch = read_config(CONFIG)
    weights = RandomWeights(arch, torch.float32, torch.device("cpu"), std=WEIGHT_STD)
    save_file(
        {name: weights.read(name) for name in weight_shapes(arch)}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))


def generate(folder: Path, backend: str, dtype: str, mode: str) -> tuple[list[list[int]], float]:
    """Greedy tokens of 12 prompts, some of which share a prefix; and the seconds it took."""
    rng = random.Random(5)
    shared = [rng.randrange(990) for _ in range(40)]
    prompts = [
        (shared if index % 3 == 0 else []) + [rng.randrange(990) for _ in range(5 + 17 * index)]
        for index in range(12)
    ]
    engine = Engine(
        EngineConfig.from_options(
            model=str(folder), backend=backend, dtype=dtype, num_blocks=400, **MODES[mode]
        )
    )
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
        engine.handle(AddRequest(request_id=str(index), token_ids=prompt, sampling=sampling))
    started = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
        engine.scheduler.check_invariants()
    for output in engine.step():
        tokens[output.request_id] += output.token_ids
    return list(tokens.values()), time.perf_counter() - started


def equal_share(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Share of tokens before each request's first difference."""
    same = 0
    for ours, theirs in zip(found, wanted, strict=True):
        pairs = zip(ours, theirs, strict=False)
        same += next((place for place, (a, b) in enumerate(pairs) if a != b), len(theirs))
    return same / sum(map(len, wanted))


def compare_backends(report: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder)
        for mode in MODES:
            for dtype in ("float32", "bfloat16"):
                wanted, _ = generate(folder, "cpu", dtype, mode)
                share = compare(report, f"{mode} {dtype} triton", folder, (), wanted)
                compare(report, f"{mode} {dtype} twins", folder, tuple(TWINS), wanted)
                if dtype == "float32" and share < 1:  # which group of kernels is it?
                    for name, groups in single_groups().items():
                        compare(report, f"{mode} {dtype} {name}", folder, groups, wanted)


def single_groups() -> dict[str, tuple[str, ...]]:
    """Each group of Triton kernels alone: the twins that stand in for all others."""
    return {f"only {group}": tuple(other for other in TWINS if other != group) for group in TWINS}


def compare(
    report: dict[str, Any],
    name: str,
    folder: Path,
    groups: tuple[str, ...],
    wanted: list[list[int]],
) -> float:
    """The share of tokens equal to `wanted`, 0 when the engine fails."""
    mode, dtype = name.split()[:2]
    try:
        with twins_for(groups):
            found, seconds = generate(folder, "cuda", dtype, mode)
            again, _ = generate(folder, "cuda", dtype, mode)
    except Exception as problem:  # the other variants show which kernels are at fault
        print(f"FAILED engine {name}: {traceback.format_exc()[-1500:]}")
        report[f"engine {name}"] = repr(problem)[:300]
        return 0.0
    share = equal_share(found, wanted)
    report[f"engine {name}"] = {
        "equal_to_cpu": share,
        "repeats": found == again,
        "seconds": seconds,
    }
    print(
        f"engine {name}: {share:.1%} of greedy tokens equal to the CPU's, "
        f"repeats itself: {found == again}, {seconds:.1f} s"
    )
    return share
