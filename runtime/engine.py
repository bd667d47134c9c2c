"""The engine: receive -> schedule -> run -> apply -> send, one step at a time, in one thread.

Joins deciding and doing. Knows nothing of sockets, text or kernels.
"""

import dataclasses
import logging
import os
import time
from collections import deque

import torch

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.constraints import Constraints
from zipage_lang.runtime.engine_parts import (
    EngineParts,
    configured_backend,
    gather_parts,
    make_runner,
)
from zipage_lang.runtime.grammar_gate import GrammarGate, Passed
from zipage_lang.runtime.laps import Laps
from zipage_lang.runtime.messages import (
    Abort,
    AddRequest,
    Fork,
    GetSnapshot,
    Ready,
    Release,
    Stop,
    TokenOutput,
)
from zipage_lang.runtime.model_runner import Launched
from zipage_lang.runtime.open_requests import OpenRequests
from zipage_lang.runtime.policies.registry import PolicyQueries
from zipage_lang.runtime.request import RequestRefused
from zipage_lang.runtime.scheduler import Scheduler
from zipage_lang.runtime.self_check import SelfCheck
from zipage_lang.runtime.snapshot import Snapshot
from zipage_lang.runtime.start_turn import turn_on_card
from zipage_lang.runtime.step_plan import StepPlan
from zipage_lang.runtime.vocabulary import load_vocabulary

log = logging.getLogger("zipage.engine")
start_log = logging.getLogger("zipage.start")

COMPILE_POLL_S = 0.01  # how long an engine with nothing else to do waits for a grammar at a time


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Seconds spent since the start."""

    scheduling_s: float = 0.0
    launching_s: float = 0.0  # on the CPU this is the forward pass itself
    waiting_s: float = 0.0
    applying_s: float = 0.0


class Engine:
    """One model, one pool, one scheduler. Not thread-safe: messages are handled between steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and allocate the pool. Raises ValueError or RuntimeError with the fix."""
        if config.model.num_threads is not None:
            torch.set_num_threads(config.model.num_threads)
        self.config = config
        laps = Laps()
        backend = configured_backend(config.model)
        with turn_on_card(backend.device):
            parts, constraints = self._take_memory(backend, laps)
        limits = parts.limits
        self.arch = parts.loaded.arch
        self._gate = GrammarGate(
            constraints, config.scheduler.max_waiting, config.scheduler.max_waiting_per_tenant
        )
        self._constraints = constraints
        self._open = OpenRequests()
        num_host_blocks = self.runner.take_host_memory()
        self.limits = limits = dataclasses.replace(limits, num_host_blocks=num_host_blocks)
        laps.end("host memory")
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            config.compression,
            limits,
            PolicyQueries(parts.policies, limits.window, parts.calibrations.prepare),
        )
        self._self_check = SelfCheck(self.scheduler.check_invariants, os.environ)
        self.start_s = laps.seconds
        self.times = StepTimes()
        self._in_flight: deque[tuple[StepPlan, Launched]] = deque()
        wants_overlap = config.scheduler.overlap
        is_ahead = parts.backend.name == "cuda" if wants_overlap is None else wants_overlap
        self._num_ahead = 1 if is_ahead else 0
        self.ready = _ready(parts)

    def _take_memory(self, backend: Backend, laps: Laps) -> tuple[EngineParts, Constraints]:
        """Weights, pool and graphs: what a start measures the device for, then takes."""
        start_log.info("loading the model")
        parts = gather_parts(self.config, backend, laps)
        limits = parts.limits
        start_log.info("making the KV pool")
        constraints = Constraints(
            lambda: load_vocabulary(parts.path, limits.vocab_size), limits.eos_token_ids
        )
        self.runner = make_runner(parts, limits, constraints.make)
        laps.end("pool")
        self.runner.capture_graphs(
            self.config.compression.kv_mode != "off",
            lambda done, total: start_log.info(
                "capturing decode graphs", extra={"count": (done, total)}
            ),
        )
        laps.end("graphs")
        return parts, constraints

    def handle(self, message: AddRequest | Fork | Stop | Abort | Release) -> None:
        """Take in a client's message. A refused request gets its error as an output.

        Requests whose grammar is not compiled yet wait outside the scheduler until it is. One whose
        id is open already came twice; it is dropped and counted, and the first goes on.
        """
        match message:
            case AddRequest() | Fork():
                new = self._open.take(message)
                passed = None if new is None else self._gate.take(new)
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

    def refuse_lost(self, message: AddRequest | Fork, error: str) -> None:
        """`handle` broke off: tell the error to those of the message that nothing came of."""
        for request in [message] if isinstance(message, AddRequest) else message.children:
            if request.request_id in self._open and not self._has_taken(request.request_id):
                self.scheduler.refuse(request, error)

    def _has_taken(self, request_id: str) -> bool:
        """Whether it is somewhere on its way to its one end."""
        scheduler = self.scheduler
        return (
            self._gate.is_waiting(request_id)
            or scheduler.knows(request_id)
            or scheduler.is_ending(request_id)
        )

    def forget_all(self) -> None:
        """The client has left: end what it asked for, drop what it holds, and tell nobody."""
        self.handle(Abort(request_ids=self._open.ids))
        self.handle(Release(request_ids=self.scheduler.held_ids))
        self._note_outputs(self.scheduler.take_outputs())

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
        if not self.has_work:
            self.runner.note_idle()
        outputs = self.scheduler.take_outputs()
        self._note_outputs(outputs)
        return outputs

    def _note_outputs(self, outputs: list[TokenOutput]) -> None:
        self._gate.note_outputs(outputs)
        self._open.note(outputs)

    def stats(self) -> dict[str, int | float | str]:
        """Counts, gauges and times by name."""
        return {
            "backend": self.ready.backend,
            "model": self.ready.model,
            **self.scheduler.stats(),
            **self.scheduler.queue_times(),
            "num_replayed": self._open.num_replayed,
            "num_self_checks": self._self_check.num_checks,
            **dataclasses.asdict(self.times),
            **self.runner.device_times(),
            **{f"table_{name}": size for name, size in self.table_sizes().items()},
        }

    def table_sizes(self) -> dict[str, int]:
        """Entries of every table that grows with requests and must shrink again, by name."""
        return {
            "open_requests": len(self._open.ids),
            "in_flight": len(self._in_flight),
            **self.scheduler.table_sizes(),
            **self._gate.table_sizes(),
            **self._constraints.table_sizes(),
        }

    def snapshot(self, message: GetSnapshot) -> Snapshot:
        """What people look at: the stats and a bounded picture. Made only when asked for."""
        return self.scheduler.snapshot(
            self.stats(),
            max_cells=message.max_cells,
            max_nodes=message.max_nodes,
            max_requests=message.max_requests,
        )

    def _launch_next(self) -> bool:
        """Plan and launch a step. False when there is nothing to do but wait for results."""
        started = time.perf_counter()
        self.scheduler.note_compacted(self.runner.go_on_behind_compactions())
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        self.times.scheduling_s += planned - started
        if plan.is_empty:
            return False
        launched = self.runner.launch(plan)
        self._in_flight.append((plan, launched))
        if launched.trouble is not None:  # before anybody can build on what is not there
            self.scheduler.note_trouble(plan, launched.trouble)
        self.times.launching_s += time.perf_counter() - planned
        return True

    def _take_in_oldest(self) -> None:
        plan, launched = self._in_flight.popleft()
        started = time.perf_counter()
        result = self.runner.collect(launched)
        collected = time.perf_counter()
        self.scheduler.apply(plan, result)
        self._self_check.note_step()
        self.times.waiting_s += collected - started
        self.times.applying_s += time.perf_counter() - collected


def _ready(parts: EngineParts) -> Ready:
    limits = parts.limits
    return Ready(
        model=parts.config.model.model,
        model_path=str(parts.path),
        architecture=parts.loaded.arch.architecture,
        backend=parts.backend.name,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=list(limits.eos_token_ids),
        num_blocks=limits.num_blocks,
        block_size=parts.config.cache.block_size,
        kv_mode=parts.config.compression.kv_mode,
    )
