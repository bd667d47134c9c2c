"""A small random model, engines over it, and what a request says in them.

Knows nothing of what strict mode promises.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from zipage_lang.kernels.backend import Forecast
from zipage_lang.runtime import engine_parts
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.kv_cache import KVShape
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, Fork, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams

MAX_STEPS = 20_000
SHAPE = {  # SmolLM2's proportions
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 72,
    "intermediate_size": 150,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Said:
    """What one sample said: compared bit by bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...]
    prompt_logprobs: tuple[Any, ...]


Outputs = dict[tuple[str, int], Said]


class Lab:
    """One engine, stepped by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._outputs: dict[tuple[str, int], list[TokenOutput]] = {}

    def step(self) -> None:
        for output in self.engine.step():
            key = (output.request_id, output.sample_index)
            self._outputs.setdefault(key, []).append(output)

    def say(
        self,
        messages: Sequence[AddRequest],
        late: Sequence[AddRequest] = (),
        parent_id: str | None = None,
    ) -> Outputs:
        """All samples of the messages; those that are `late` come some steps after the others.

        parent_id: a held request that the messages branch off.
        """
        if parent_id is not None:
            self.engine.handle(Fork(parent_id=parent_id, children=list(messages)))
        else:
            for message in messages:
                self.engine.handle(message)
        for message in late:
            self.step()
            self.step()
            self.engine.handle(message)
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        self.step()
        self.engine.scheduler.check_invariants()
        return {
            (message.request_id, index): self._said(message.request_id, index)
            for message in (*messages, *late)
            for index in range(message.sampling.n)
        }

    def _said(self, request_id: str, index: int) -> Said:
        outputs = self._outputs.pop((request_id, index))
        assert outputs[-1].is_final, f"{request_id}/{index} has not ended"
        assert outputs[-1].error is None, outputs[-1].error
        return Said(
            tuple(token_id for output in outputs for token_id in output.token_ids),
            tuple(entry for output in outputs for entry in output.logprobs or ()),
            tuple(entry for output in outputs for entry in output.prompt_logprobs or ()),
        )


def _random_forecast(_path: Path, _loaded: object, shape: KVShape, backend: Any) -> Forecast:
    """zipage2's, without the minutes that it takes to make one."""
    generator = torch.Generator().manual_seed(3)
    heads = (shape.num_layers, shape.num_kv_heads)
    parts = (
        torch.randn(*heads, shape.head_dim, generator=generator),
        torch.randn(*heads, shape.head_dim, generator=generator),
        -torch.rand(heads, generator=generator),
        torch.rand(shape.head_dim // 2, generator=generator),
    )
    return Forecast(*(part.to(backend.device) for part in parts))


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strict")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture(scope="session")
def make_lab(small_model: Path):
    """Lab over a new engine: a strict one unless asked otherwise."""

    def make(**options: Any) -> Lab:
        options = {
            "model": str(small_model),
            "load_format": "dummy",
            "deterministic": True,
            "num_threads": 1,
            "num_blocks": 600,
            "swap_space": 0.01,
            "growth_reserve": 0,
            "backend": "cpu",
            **options,
        }
        return Lab(Engine(EngineConfig.from_options(**options)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_parts, "load_or_make_forecast", _random_forecast)
        yield make


@pytest.fixture(scope="session")
def alone(make_lab: Callable[..., Lab]) -> Callable[..., Outputs]:
    """What a message says in an engine with room for all, nothing cached, prompts in one go."""
    labs: dict[tuple[Any, ...], Lab] = {}

    def say(message: AddRequest, **options: Any) -> Outputs:
        key = tuple(sorted(options.items()))
        if key not in labs:
            block_size = options.get("block_size", 16)
            labs[key] = make_lab(
                num_blocks=3200 // block_size, prefix_caching=False, num_query_slots=8, **options
            )
        return labs[key].say([message])

    return say


@pytest.fixture(scope="session")
def crowd() -> list[AddRequest]:
    """Requests of every kind of policy, greedy and seeded in turn, each compacted several times."""
    policies = ("zipage", "zipage2", "streaming", "random", "tiers", "rkv", "h2o", "zipage")
    return [
        AddRequest(
            request_id=f"c{index}",
            token_ids=[(7 * index + place) % SHAPE["vocab_size"] for place in range(5 + index)],
            sampling=SamplingParams(
                temperature=index % 2, seed=index, max_tokens=40, logprobs=1, ignore_eos=True
            ),
            kv=KVParams(mode="fixed", budget=16, interval=8, policy=policy),
        )
        for index, policy in enumerate(policies)
    ]


@pytest.fixture(scope="session")
def crowd_alone(crowd: list[AddRequest], alone: Callable[..., Outputs]) -> Outputs:
    """What each of the crowd says alone, at block size 4."""
    said: Outputs = {}
    for request in crowd:
        said |= alone(request, block_size=4)
    return said
