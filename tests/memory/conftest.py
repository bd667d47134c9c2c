"""A small engine, a mixed load for it, and the same load while memory is refused."""

import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_support.refusals import Refusals, RefusedMemory

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, Fork, Release, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_budget import StepBudget

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 199,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
OPTIONS = {
    "load_format": "dummy",
    "backend": "cpu",
    "num_threads": 1,
    "max_running": 8,
    "max_step_tokens": 64,
    "num_query_slots": 8,
}
FIXED = KVParams(mode="fixed", budget=24, interval=8)
OFF = KVParams(mode="off")
Key = tuple[str, int]  # request, sample


@pytest.fixture(scope="module", autouse=True)
def calm_garbage_collector() -> Iterator[None]:
    """As in an engine's process: a refusal collects garbage, and not all of torch is walked."""
    with RefusedMemory(Refusals()):
        torch.zeros(1).neg()  # imports a large part of torch
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("little-model")
    (folder / "config.json").write_text(json.dumps(ARCHITECTURE))
    return folder


@pytest.fixture(scope="session")
def make_engine(model_folder) -> Callable[..., Engine]:
    def make(**options) -> Engine:
        options = {"num_blocks": 100, "swap_space": 0.01, **OPTIONS, **options}
        return Engine(EngineConfig.from_options(model=str(model_folder), **options))

    return make


def prompt(seed: int, length: int) -> list[int]:
    return [(17 * seed + 7 * place + place * place) % 190 + 1 for place in range(length)]


def request(name: str, tokens: list[int], kv: KVParams = OFF, *, hold=False, **sampling):
    sampling = {"max_tokens": 24, "seed": len(name), "ignore_eos": True, **sampling}
    return AddRequest(
        request_id=name, token_ids=tokens, kv=kv, hold=hold, sampling=SamplingParams(**sampling)
    )


def mixed_requests() -> list[AddRequest]:
    """All that takes memory of its own: long prompts, samples, scores, penalties, compactions."""
    shared = prompt(1, 40)
    return [
        request("long", prompt(2, 150), temperature=0),
        request("samples", [*shared, 5], n=3, temperature=0.9),
        request("same start", [*shared, 6], temperature=0.8, top_k=20),
        request("scored", prompt(3, 20), temperature=0, logprobs=3, prompt_logprobs=2),
        request("penal", prompt(4, 9), temperature=0.7, repetition_penalty=1.3, logprobs=0),
        request("bound", prompt(5, 12), FIXED, temperature=0, max_tokens=60),
        request("bounds", prompt(6, 70), dataclasses.replace(FIXED, protected_len=8), n=2),
        request("parent", prompt(7, 21), temperature=0, hold=True, max_tokens=6),
        request("held", prompt(8, 10), FIXED, temperature=0, hold=True, max_tokens=45),
    ]


@dataclasses.dataclass(slots=True)
class Run:
    """One mixed load, told output by output."""

    tokens: dict[Key, list[int]] = dataclasses.field(default_factory=dict)
    scores: dict[Key, list[int]] = dataclasses.field(default_factory=dict)  # ids, prompt and output
    errors: dict[Key, str] = dataclasses.field(default_factory=dict)
    ended: set[Key] = dataclasses.field(default_factory=set)
    num_refused: int = 0

    def take(self, output: TokenOutput) -> None:
        key = (output.request_id, output.sample_index)
        assert key not in self.ended, f"{key} had ended: {output}"
        self.tokens.setdefault(key, []).extend(output.token_ids)
        known = self.scores.setdefault(key, [])
        entries = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
        known.extend(entry.token_id for entry in entries if entry is not None)
        if output.is_final:
            self.ended.add(key)
        if output.error is not None:
            self.errors[key] = output.error


class MixedRuns:
    """Runs the mixed load on one engine again and again, each time from an empty cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, refuse_at: dict[int, Refusals] | None = None) -> Run:
        """refuse_at: step of this run -> what is refused while it is launched."""
        run, refuse_at = Run(), refuse_at or {}
        scheduler = self.engine.scheduler
        scheduler._budget = StepBudget(self.engine.config.scheduler.max_step_tokens)
        launch, number = self.engine.runner.launch, iter(range(10**6))

        def launch_with_little_memory(plan):
            refusals = refuse_at.get(next(number))
            if refusals is None:
                return launch(plan)
            with RefusedMemory(refusals):
                launched = launch(plan)
            run.num_refused += refusals.num_refused
            return launched

        self.engine.runner.launch = launch_with_little_memory
        try:
            self._play(run)
        finally:
            del self.engine.runner.launch
        return run

    def _play(self, run: Run) -> None:
        for message in mixed_requests():
            self.engine.handle(message)
        self._step_to_the_end(run)
        for name in ("parent", "held"):
            tokens = next(r.token_ids for r in mixed_requests() if r.request_id == name)
            known = [*tokens, *run.tokens[name, 0]]
            kv = FIXED if name == "held" else OFF
            children = [request(f"{name}'s {n}", [*known, n], kv, temperature=0.5) for n in (1, 2)]
            self.engine.handle(Fork(parent_id=name, children=children))
        self._step_to_the_end(run)
        self.engine.handle(Release(request_ids=["parent", "held"]))
        self._check_everything_is_home()

    def _step_to_the_end(self, run: Run) -> None:
        for _ in range(3000):
            for output in self.engine.step():
                run.take(output)
            self.engine.scheduler.check_invariants()
            if not self.engine.has_work:
                return
        raise AssertionError(f"never ended: {self.engine.stats()}")

    def _check_everything_is_home(self) -> None:
        engine = self.engine
        engine.scheduler.flush_cache()
        engine.scheduler.check_invariants()
        stats = engine.stats()
        assert stats["num_free"] == stats["num_blocks"], stats
        assert stats["num_free_query_slots"] == engine.limits.num_query_slots, stats
        assert stats["num_free_host_blocks"] == engine.limits.num_host_blocks, stats
        state = engine.scheduler._state
        assert state.num_free_rows == engine.config.scheduler.max_running
        assert not state.parting
        assert not state.compacting


@pytest.fixture(scope="session")
def make_runs(make_engine) -> Callable[..., MixedRuns]:
    return lambda **options: MixedRuns(make_engine(**options))
