"""Engines and reference outputs that the end-to-end tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams

POOL_TOKENS = 9600  # small, so that checking every invariant after every step stays cheap
Outputs = dict[tuple[str, int], list[TokenOutput]]


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


class Driver:
    """An engine in this process, stepped by hand, its invariants checked after every step."""

    def __init__(self, model: Path | str, **options: Any) -> None:
        options = {"swap_space": 0.05, "num_threads": 1, **options}
        options.setdefault("num_blocks", POOL_TOKENS // options.get("block_size", 16))
        self.engine = Engine(EngineConfig.from_options(model=str(model), **options))
        self.outputs: Outputs = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        kv: KVParams | None = None,
        **sampling: Any,
    ) -> None:
        message = AddRequest(
            request_id=request_id, token_ids=prompt, sampling=SamplingParams(**sampling), kv=kv
        )
        self.engine.handle(message)

    def step(self) -> None:
        for output in self.engine.step():
            key = (output.request_id, output.sample_index)
            self.outputs.setdefault(key, []).append(output)
        self.engine.scheduler.check_invariants()

    def finish(self) -> Outputs:
        """Step until nobody is left; returns every sample's outputs."""
        while self.engine.has_work:
            self.step()
        self.step()
        return self.outputs

    def tokens(self, request_id: str, sample_index: int = 0) -> list[int]:
        return tokens_of(self.outputs[request_id, sample_index])

    def final(self, request_id: str, sample_index: int = 0) -> TokenOutput:
        return self.outputs[request_id, sample_index][-1]

    def greedy(
        self, prompts: list[list[int]], max_tokens: int, name: str = "greedy"
    ) -> list[list[int]]:
        """Greedy continuations of all prompts, sent at once; `name` must not have been used."""
        for index, prompt in enumerate(prompts):
            self.add(f"{name}-{index}", prompt, temperature=0, max_tokens=max_tokens)
        self.finish()
        return [self.tokens(f"{name}-{index}") for index in range(len(prompts))]


@pytest.fixture(scope="session")
def driver() -> Callable[..., Driver]:
    return Driver


def pad_left(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def reference_greedy(
    model: Any, prompts: list[list[int]], max_tokens: int, eos_token_ids: list[int]
) -> list[list[int]]:
    """transformers' greedy continuations, cut behind the first end-of-sequence token."""
    ids, mask = pad_left(prompts, pad=0)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos_token_ids or None,
            pad_token_id=0,
        )
    return [_cut(line[ids.shape[1] :].tolist(), eos_token_ids) for line in out]


def confirmed_greedy(
    model: Any, prompt: list[int], guess: list[int], max_tokens: int, eos_token_ids: list[int]
) -> list[int]:
    """transformers' greedy continuation of one prompt, whatever `guess` is.

    One pass tells what it would say behind each token of the guess. Up to the first difference
    that is its own continuation, token by token; behind it the model goes on by itself.
    """
    said: list[int] = []
    while len(said) < max_tokens and not set(said) & set(eos_token_ids):
        known = prompt + said
        ids = torch.tensor([known + guess])  # [1, length]
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(guess) + 1).logits[0]  # [guess + 1, vocab]
        best = logits.argmax(-1).tolist()
        num_right = next((i for i, token in enumerate(guess) if token != best[i]), len(guess))
        said += best[: num_right + 1]
        guess = []
    return _cut(said[:max_tokens], eos_token_ids)


def _cut(tokens: list[int], eos_token_ids: list[int]) -> list[int]:
    ends = [index + 1 for index, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: ends[0]] if ends else tokens


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """A random tiny model made by transformers on the spot: (folder, the transformers model)."""

    def make(family: str, **options: Any) -> tuple[Path, Any]:
        config_class = getattr(transformers, f"{family}Config")
        model_class = getattr(transformers, f"{family}ForCausalLM")
        settings = {
            "vocab_size": 199,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 16,
            "max_position_embeddings": 8192,
            "initializer_range": 0.2,
            "eos_token_id": None,
            "bos_token_id": None,
            "pad_token_id": None,
            **options,
        }
        torch.manual_seed(1)
        model = model_class(config_class(**settings)).eval()
        folder = tmp_path_factory.mktemp(family.lower())
        model.save_pretrained(folder)
        return folder, model

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[list[int]]]:
    return reference_greedy


@pytest.fixture(scope="session")
def confirmed() -> Callable[..., list[int]]:
    return confirmed_greedy
