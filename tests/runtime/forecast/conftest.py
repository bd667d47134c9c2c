"""A tiny model with random weights, and what is needed to let it write.

Knows nothing of what is measured on its text.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from zipage_lang.kernels.backend import Backend, choose_backend
from zipage_lang.runtime.engine_parts import kv_shape
from zipage_lang.runtime.kv_cache import KVShape
from zipage_lang.runtime.models.registry import LoadedModel, load_dummy_model
from zipage_lang.runtime.models.rope import rotary_frequencies
from zipage_lang.runtime.written_text import TextWriter

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 5,
    "bos_token_id": 3,
}


@dataclasses.dataclass(frozen=True)
class World:
    """The model, and writers of its text."""

    path: Path
    loaded: LoadedModel
    shape: KVShape
    backend: Backend

    @property
    def frequencies(self):
        return rotary_frequencies(self.loaded.arch, self.loaded.max_model_len)[0]

    def writer(self, num_sequences=3, max_len=24, window=4, starts=((3,),), seed=1, stops=()):
        with torch.inference_mode():
            return TextWriter(
                self.loaded,
                self.shape,
                self.backend,
                num_sequences=num_sequences,
                max_len=max_len,
                window=window,
                starts=starts,
                seed=seed,
                stop_tokens=stops,
            )


def make_world(folder, std=0.3, dtype=torch.float32, **differences):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | differences))
    backend = choose_backend("cpu")
    loaded = load_dummy_model(str(folder), dtype, backend, None, std=std)
    return World(folder, loaded, kv_shape(loaded, dtype), backend)


@pytest.fixture
def world_of(tmp_path):
    """world_of(std=0.3, dtype=torch.float32, **config differences) -> World."""
    return lambda **settings: make_world(tmp_path / "model", **settings)


@pytest.fixture
def world(world_of):
    return world_of()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
