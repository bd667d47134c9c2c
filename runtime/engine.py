"""The engine: receive -> schedule -> run -> apply -> send, one step at a time, in one thread.

Joins deciding and doing. Knows nothing of sockets, text or kernels.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from zipage_lang.kernels.backend import Backend, choose_backend
from zipage_lang.runtime.compactor import Compactor
from zipage_lang.runtime.config import EngineConfig, ModelConfig
from zipage_lang.runtime.constraints import Constraints
from zipage_lang.runtime.decode_graphs import DecodeGraphs
from zipage_lang.runtime.grammar_gate import GrammarGate, Passed
from zipage_lang.runtime.host_swap import make_host_swap
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.memory_probe import (
    card_meter,
    explained_out_of_memory,
    measure_needs,
    memory_in_use,
    worst_case,
)
from zipage_lang.runtime.memory_sizing import (
    GIB,
    NUM_DUMMY_BLOCKS,
    fitting_blocks,
    unmeasured_blocks,
)
from zipage_lang.runtime.messages import (
    Abort,
    AddRequest,
    Fork,
    Ready,
    Release,
    Stop,
    TokenOutput,
)
from zipage_lang.runtime.model_runner import Launched, ModelRunner
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.runtime.models.registry import LoadedModel, load_dummy_model, load_model
from zipage_lang.runtime.policies.policy import Policy
from zipage_lang.runtime.policies.registry import load_policies
from zipage_lang.runtime.request import RequestRefused
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.sampler import MakeConstraint, Sampler
from zipage_lang.runtime.scheduler import Scheduler
from zipage_lang.runtime.step_plan import StepPlan
from zipage_lang.runtime.vocabulary import load_vocabulary

log = logging.getLogger("zipage.engine")

COMPILE_POLL_S = 0.01  # how long an engine with nothing else to do waits for a grammar at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Seconds spent since the start."""

    scheduling_s: float = 0.0
    launching_s: float = 0.0  # on the CPU this is the forward pass itself
    waiting_s: float = 0.0
    applying_s: float = 0.0


class Laps:
    """Seconds between marks, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def end(self, name: str) -> None:
        """What passed since the last mark was `name`."""
        now = time.perf_counter()
        self.seconds[name], self._started = now - self._started, now


class Engine:
    """One model, one pool, one scheduler. Not thread-safe: messages are handled between steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and allocate the pool. Raises ValueError or RuntimeError with the fix."""
        if config.model.num_threads is not None:
            torch.set_num_threads(config.model.num_threads)
        dtype = DTYPES[config.model.dtype]
        laps = Laps()
        backend = choose_backend(config.model.backend, dtype)
        used_before = memory_in_use(backend.device)
        path, loaded = _load(config.model, dtype, backend)
        policies = load_policies()
        laps.end("weights")
        shape = _kv_shape(loaded, dtype)
        limits = _find_limits(config, loaded, shape, policies)
        if backend.device.type == "cuda":
            num_blocks = _measure_blocks(
                config, loaded, shape, limits, backend, policies, used_before
            )
            limits = dataclasses.replace(limits, num_blocks=num_blocks)
        laps.end("sizing")
        self.config, self.limits, self.arch = config, limits, loaded.arch
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            config.compression,
            limits,
            {name: policy.num_queries for name, policy in policies.items()},
        )
        constraints = Constraints(
            lambda: load_vocabulary(path, limits.vocab_size), limits.eos_token_ids
        )
        self._gate = GrammarGate(constraints, config.scheduler.max_waiting)
        self.runner = _make_runner(
            config, loaded, shape, limits, backend, policies, constraints.make
        )
        laps.end("pool")
        self.runner.capture_graphs(
            config.compression.kv_mode != "off",
            lambda done, total: log.info("captured %d of %d decode graphs", done, total),
        )
        laps.end("graphs")
        self.runner.take_host_memory()
        laps.end("host memory")
        self.start_s = laps.seconds
        self.times = StepTimes()
        self._in_flight: deque[tuple[StepPlan, Launched]] = deque()
        wants_overlap = config.scheduler.overlap
        is_ahead = backend.name == "cuda" if wants_overlap is None else wants_overlap
        self._num_ahead = 1 if is_ahead else 0
        self.ready = _ready(config, loaded, path, limits, backend)

    def handle(self, message: AddRequest | Fork | Stop | Abort | Release) -> None:
        """Take in a client's message. A refused request gets its error as an output.

        Requests whose grammar is not compiled yet wait outside the scheduler until it is.
        """
        match message:
            case AddRequest() | Fork():
                passed = self._gate.take(message)
                if passed is not None:
                    self._let_in(passed)
            case Stop():
                self.scheduler.stop(message)
            case Abort():
                for request in self._gate.abort(message):
                    self.scheduler.abort_unseen(request)
                self.scheduler.abort(message)
            case Release():
                self.scheduler.release(message)

    def _let_in(self, passed: Passed) -> None:
        message = passed.message
        for request, error in passed.refused:
            self.scheduler.refuse(request, error)
        refused = [request for request, _ in passed.refused]
        if isinstance(message, Fork):
            children = [child for child in message.children if child not in refused]
            self.scheduler.fork(Fork(parent_id=message.parent_id, children=children))
        elif not refused:
            try:
                self.scheduler.add(message)
            except RequestRefused as refusal:
                self.scheduler.refuse(message, str(refusal))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or self._gate.has_waiting

    def step(self) -> list[TokenOutput]:
        """Move everyone on by one step and return what is to be told. Does nothing without work.

        With overlap, a step is planned and launched while the one before it still runs; then the
        result of that one is taken in.
        """
        for passed in self._gate.pass_on():
            self._let_in(passed)
        if self.scheduler.has_work or self._in_flight:
            is_idle = not self._launch_next()
            if is_idle and not self._in_flight:
                self.scheduler.note_compacted(self.runner.wait_for_compactions())
            while len(self._in_flight) > self._num_ahead or (is_idle and self._in_flight):
                self._take_in_oldest()
        elif self._gate.has_waiting:
            self._gate.wait(COMPILE_POLL_S)
        outputs = self.scheduler.take_outputs()
        self._gate.note_outputs(outputs)
        return outputs

    def stats(self) -> dict[str, int | float | str]:
        """Counts, gauges and times by name."""
        return {
            "backend": self.ready.backend,
            "model": self.ready.model,
            **self.scheduler.stats(),
            **dataclasses.asdict(self.times),
            **self.runner.device_times(),
        }

    def _launch_next(self) -> bool:
        """Plan and launch a step. False when there is nothing to do but wait for results."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        self.times.scheduling_s += planned - started
        if plan.is_empty:
            return False
        self._in_flight.append((plan, self.runner.launch(plan)))
        self.times.launching_s += time.perf_counter() - planned
        return True

    def _take_in_oldest(self) -> None:
        plan, launched = self._in_flight.popleft()
        started = time.perf_counter()
        result = self.runner.collect(launched)
        collected = time.perf_counter()
        self.scheduler.apply(plan, result)
        self.times.waiting_s += collected - started
        self.times.applying_s += time.perf_counter() - collected


def _load(model: ModelConfig, dtype: torch.dtype, backend: Backend) -> tuple[Path, LoadedModel]:
    with explained_out_of_memory(f"model {model.model!r} in {model.dtype}", backend.device):
        if model.load_format == "dummy":
            loaded = load_dummy_model(model.model, dtype, backend, model.max_model_len)
            return Path(model.model), loaded
        path = resolve_model(model.model)
        return path, load_model(path, dtype, backend, model.max_model_len)


def _kv_shape(loaded: LoadedModel, dtype: torch.dtype) -> KVShape:
    arch = loaded.arch
    return KVShape(
        num_layers=arch.num_layers,
        num_q_heads=arch.num_q_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        dtype=dtype,
    )


def _find_limits(
    config: EngineConfig, loaded: LoadedModel, shape: KVShape, policies: Mapping[str, Policy]
) -> Limits:
    """With the blocks that a CPU gets; a card is measured once the rest is known."""
    cache = config.cache
    block_bytes = shape.block_bytes(cache.block_size)
    return Limits(
        num_blocks=unmeasured_blocks(cache, block_bytes),
        num_host_blocks=int(cache.swap_space * GIB) // block_bytes,
        num_query_slots=_num_query_slots(config),
        window=max(1, *(policy.num_queries for policy in policies.values())),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.arch.vocab_size,
        eos_token_ids=list(loaded.arch.eos_token_ids),
    )


def _num_query_slots(config: EngineConfig) -> int:
    """As asked, else a quarter of the rows: each needs one for `window` tokens per interval only,
    and a ring takes as much memory as `window` query tokens in all layers."""
    max_running = config.scheduler.max_running
    few = min(max_running, max(16, max_running // 4))
    return config.compression.num_query_slots or few


def _measure_blocks(
    config: EngineConfig,
    loaded: LoadedModel,
    shape: KVShape,
    limits: Limits,
    backend: Backend,
    policies: Mapping[str, Policy],
    used_before: int,
) -> int:
    """Usable blocks of a pool on a card; see `memory_sizing`."""
    block_bytes = shape.block_bytes(config.cache.block_size)

    def make_runner(num_blocks: int) -> tuple[ModelRunner, int]:
        small = dataclasses.replace(limits, num_blocks=num_blocks)  # takes no host memory yet
        runner = _make_runner(config, loaded, shape, small, backend, policies)
        return runner, (num_blocks + NUM_DUMMY_BLOCKS) * block_bytes

    needs = measure_needs(
        make_runner,
        worst_case(config, limits, policies),
        card_meter(backend.device),
        used_before=used_before,
        logits_row_bytes=limits.vocab_size * shape.dtype.itemsize,
    )
    num_blocks = fitting_blocks(needs, config.cache, block_bytes)
    log.info(
        "KV pool: %.2f GiB (%d blocks) %s",
        num_blocks * block_bytes / GIB,
        num_blocks,
        needs.describe(),
    )
    return num_blocks


def _make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    shape: KVShape,
    limits: Limits,
    backend: Backend,
    policies: Mapping[str, Policy],
    make_constraint: MakeConstraint | None = None,
) -> ModelRunner:
    cache = KVCache(
        shape,
        num_blocks=limits.num_blocks + NUM_DUMMY_BLOCKS,
        block_size=config.cache.block_size,
        num_query_slots=limits.num_query_slots,
        window=limits.window,
        device=backend.device,
    )
    max_blocks = -(-limits.max_model_len // config.cache.block_size) + 1
    sampler = Sampler(
        max_rows=config.scheduler.max_running,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        backend=backend,
        device=backend.device,
        make_constraint=make_constraint,
    )
    tables = RowTables(config.scheduler.max_running, max_blocks)
    return ModelRunner(
        loaded,
        cache,
        backend,
        compactor=Compactor(KVCompressor(cache, backend, policies), backend.device),
        sampler=sampler,
        tables=tables,
        host_swap=make_host_swap(cache, limits.num_host_blocks, backend),
        graphs=_make_graphs(config, loaded, cache, backend, tables, sampler),
    )


def _make_graphs(
    config: EngineConfig,
    loaded: LoadedModel,
    cache: KVCache,
    backend: Backend,
    tables: RowTables,
    sampler: Sampler,
) -> DecodeGraphs | None:
    """Decode graphs, not captured yet; None on a backend that has none, or when switched off."""
    if not config.scheduler.cuda_graphs or backend.device.type != "cuda":
        return None
    max_rows = config.scheduler.max_running
    max_blocks = -(-loaded.max_model_len // config.cache.block_size) + 1
    planner = backend.graph_planner(
        loaded.arch.num_q_heads,
        loaded.arch.num_kv_heads,
        loaded.arch.head_dim,
        config.cache.block_size,
        max_rows=max_rows,
        max_blocks=max_blocks,
    )
    if planner is None:
        return None
    return DecodeGraphs(
        loaded.model, cache, tables, planner, sampler.last_token_ids, max_rows=max_rows
    )


def _ready(
    config: EngineConfig, loaded: LoadedModel, path: Path, limits: Limits, backend: Backend
) -> Ready:
    return Ready(
        model=config.model.model,
        model_path=str(path),
        architecture=loaded.arch.architecture,
        backend=backend.name,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=list(limits.eos_token_ids),
        num_blocks=limits.num_blocks,
        block_size=config.cache.block_size,
    )
