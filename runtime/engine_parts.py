"""What an engine is made of, from its settings: backend, model, limits, runner over its pool.

Knows nothing of steps, messages or the scheduler.
"""

import dataclasses
import logging
from pathlib import Path

import torch

from zipage_lang.kernels.backend import Backend, choose_backend
from zipage_lang.runtime.calibrations import Calibrations, MeasuredOnce
from zipage_lang.runtime.compactor import Compactor
from zipage_lang.runtime.config import CompressionConfig, EngineConfig, ModelConfig
from zipage_lang.runtime.decode_graphs import DecodeGraphs
from zipage_lang.runtime.forecast_source import load_or_make_forecast
from zipage_lang.runtime.host_swap import make_host_swap
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.laps import Laps
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.memory_probe import card_meter, measure_needs
from zipage_lang.runtime.memory_sizing import (
    GIB,
    NUM_DUMMY_BLOCKS,
    fitting_blocks,
    unmeasured_blocks,
)
from zipage_lang.runtime.model_runner import ModelRunner
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.runtime.models.registry import LoadedModel, load_dummy_model, load_model
from zipage_lang.runtime.out_of_memory import Retries, explained_out_of_memory, memory_in_use
from zipage_lang.runtime.policies.registry import Policies, load_policies
from zipage_lang.runtime.query_stats import measure_query_stats
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.sampler import MakeConstraint, Sampler
from zipage_lang.runtime.worst_case import worst_case

log = logging.getLogger("zipage.engine")
start_log = logging.getLogger("zipage.start")

# Each layer of each request is compacted apart, so that no shape of a product depends on others.
STRICT_PASS_SLOTS = 1

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True)
class EngineParts:
    """What is there before the pool is."""

    config: EngineConfig
    backend: Backend
    path: Path  # of the model; its name where the weights are random
    loaded: LoadedModel
    policies: Policies
    shape: KVShape
    limits: Limits
    calibrations: Calibrations  # measured when a policy first needs them


def configured_backend(config: ModelConfig) -> Backend:
    """Raises ValueError or SetupError, with the fix, where it can't be had."""
    dtype = DTYPES[config.dtype]
    return choose_backend(config.backend, dtype, deterministic=config.deterministic)


def gather_parts(config: EngineConfig, backend: Backend, laps: Laps) -> EngineParts:
    """Load the model and find the limits; on a card the pool's size is measured.

    Raises ValueError or RuntimeError with the fix.
    """
    dtype = DTYPES[config.model.dtype]
    used_before = memory_in_use(backend.device)
    path, loaded = load_configured(config.model, dtype, backend)
    policies = load_policies()
    laps.end("weights")
    shape = kv_shape(loaded, dtype)
    limits = _find_limits(config, loaded, shape, policies)
    calibrations = Calibrations(
        MeasuredOnce(
            lambda: measure_query_stats(loaded, shape, backend, [*limits.eos_token_ids, 0][0])
        ),
        MeasuredOnce(lambda: load_or_make_forecast(path, loaded, shape, backend)),
    )
    if config.compression.kv_mode != "off":  # requests of their own modes calibrate when they come
        calibrations.prepare(policies[config.compression.policy])
        if backend.device.type == "cuda":
            torch.cuda.empty_cache()  # what that took is the pool's
    parts = EngineParts(config, backend, path, loaded, policies, shape, limits, calibrations)
    if backend.device.type == "cuda":
        num_blocks = _measure_blocks(parts, used_before)
        parts = dataclasses.replace(
            parts, limits=dataclasses.replace(limits, num_blocks=num_blocks)
        )
    laps.end("sizing")
    return parts


def make_runner(
    parts: EngineParts, limits: Limits, make_constraint: MakeConstraint | None = None
) -> ModelRunner:
    """A runner over a pool of its own. limits: those of the parts, or a probe's smaller ones.

    Raises ValueError where there is no memory for it.
    """
    config, backend = parts.config, parts.backend
    num_blocks = limits.num_blocks + NUM_DUMMY_BLOCKS
    pool_bytes = num_blocks * parts.shape.block_bytes(config.cache.block_size)
    what = f"a KV pool of {pool_bytes / GIB:.2f} GiB ({limits.num_blocks} blocks)"
    with explained_out_of_memory(what, backend.device):
        cache = KVCache(
            parts.shape,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            num_query_slots=limits.num_query_slots,
            window=limits.window,
            device=backend.device,
        )
        return _runner_over(cache, parts, limits, make_constraint)


def _runner_over(
    cache: KVCache, parts: EngineParts, limits: Limits, make_constraint: MakeConstraint | None
) -> ModelRunner:
    config, backend, retries = parts.config, parts.backend, Retries()
    sampler = Sampler(
        max_rows=config.scheduler.max_running,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        backend=backend,
        device=backend.device,
        make_constraint=make_constraint,
        retries=retries,
    )
    tables = RowTables(config.scheduler.max_running, _max_blocks(parts))
    compressor = KVCompressor(
        cache,
        backend,
        parts.policies,
        max_pass_slots=STRICT_PASS_SLOTS if limits.deterministic else None,
        calibration_of=parts.calibrations.of,
        retries=retries,
    )
    return ModelRunner(
        parts.loaded,
        cache,
        backend,
        compactor=Compactor(compressor, backend.device),
        sampler=sampler,
        tables=tables,
        host_swap=make_host_swap(cache, limits.num_host_blocks, backend),
        graphs=_make_graphs(parts, cache, tables, sampler),
        retries=retries,
    )


def load_configured(
    model: ModelConfig, dtype: torch.dtype, backend: Backend
) -> tuple[Path, LoadedModel]:
    """The model that the settings name, and its path; the name alone where weights are random."""
    with explained_out_of_memory(f"model {model.model!r} in {model.dtype}", backend.device):
        if model.load_format == "dummy":
            loaded = load_dummy_model(model.model, dtype, backend, model.max_model_len)
            return Path(model.model), loaded
        path = resolve_model(model.model)
        return path, load_model(path, dtype, backend, model.max_model_len)


def kv_shape(loaded: LoadedModel, dtype: torch.dtype) -> KVShape:
    arch = loaded.arch
    return KVShape(
        num_layers=arch.num_layers,
        num_q_heads=arch.num_q_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        dtype=dtype,
    )


def _find_limits(
    config: EngineConfig, loaded: LoadedModel, shape: KVShape, policies: Policies
) -> Limits:
    """With the blocks that a CPU gets; a card is measured once the rest is known."""
    cache = config.cache
    block_bytes = shape.block_bytes(cache.block_size)
    return Limits(
        num_blocks=unmeasured_blocks(cache, block_bytes),
        num_host_blocks=int(cache.swap_space * GIB) // block_bytes,
        num_query_slots=_num_query_slots(config),
        window=_window(config.compression, policies),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.arch.vocab_size,
        eos_token_ids=list(loaded.arch.eos_token_ids),
        deterministic=config.model.deterministic,
    )


def _window(compression: CompressionConfig, policies: Policies) -> int:
    """As many queries as any policy asks for, the engine's default one with its parameters too."""
    usual = max(1, *(policy.num_queries for policy in policies.values()))
    try:
        return max(usual, policies[compression.policy].num_queries)
    except KeyError:
        known = ", ".join(sorted(policies))
        raise ValueError(f"unknown kv policy {compression.policy!r}; known: {known}") from None


def _num_query_slots(config: EngineConfig) -> int:
    """As asked, else a quarter of the rows: each needs one for `window` tokens per interval only,
    and a ring takes as much memory as `window` query tokens in all layers."""
    max_running = config.scheduler.max_running
    few = min(max_running, max(16, max_running // 4))
    return config.compression.num_query_slots or few


def _measure_blocks(parts: EngineParts, used_before: int) -> int:
    """Usable blocks of a pool on a card; see `memory_sizing`."""
    start_log.info("measuring memory, compiling kernels")
    config, limits = parts.config, parts.limits
    block_bytes = parts.shape.block_bytes(config.cache.block_size)

    def small_runner(num_blocks: int) -> tuple[ModelRunner, int]:
        small = dataclasses.replace(limits, num_blocks=num_blocks)  # takes no host memory yet
        return make_runner(parts, small), (num_blocks + NUM_DUMMY_BLOCKS) * block_bytes

    needs = measure_needs(
        small_runner,
        worst_case(config, limits, parts.policies),
        card_meter(parts.backend.device),
        used_before=used_before,
        logits_row_bytes=limits.vocab_size * parts.shape.dtype.itemsize,
    )
    num_blocks = fitting_blocks(needs, config.cache, block_bytes)
    log.info(
        "KV pool: %.2f GiB (%d blocks) %s",
        num_blocks * block_bytes / GIB,
        num_blocks,
        needs.describe(),
    )
    return num_blocks


def _make_graphs(
    parts: EngineParts, cache: KVCache, tables: RowTables, sampler: Sampler
) -> DecodeGraphs | None:
    """Decode graphs, not captured yet; None on a backend that has none, or when switched off."""
    config, backend, arch = parts.config, parts.backend, parts.loaded.arch
    if not config.scheduler.cuda_graphs or backend.device.type != "cuda":
        return None
    max_rows = config.scheduler.max_running
    planner = backend.graph_planner(
        arch.num_q_heads,
        arch.num_kv_heads,
        arch.head_dim,
        config.cache.block_size,
        max_rows=max_rows,
        max_blocks=_max_blocks(parts),
    )
    if planner is None:
        return None
    return DecodeGraphs(
        parts.loaded.model, cache, tables, planner, sampler.last_token_ids, max_rows=max_rows
    )


def _max_blocks(parts: EngineParts) -> int:
    """Blocks that a row's table may hold: a whole context, and one that is just being copied."""
    return -(-parts.limits.max_model_len // parts.config.cache.block_size) + 1
