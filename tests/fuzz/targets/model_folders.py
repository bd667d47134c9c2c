"""Model folders: config.json, index and safetensors with parts changed, read or refused by name.

Knows nothing of GGUF or engines.
"""

import json
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from test_support.fuzz_input import Choices, words_of

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.models.registry import load_model

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"],
    "eos_token_id": [2],
}
SCALINGS = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
)
INDEX = {"metadata": {"total_size": 10}, "weight_map": {}}
GENERATION = {"eos_token_id": [2, 3]}
SHAPES = {
    "model.embed_tokens.weight": (8, 8),
    "model.norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.self_attn.k_norm.weight": (4,),
    "model.layers.0.mlp.gate_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (8, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 8),
}
WEIGHTS = safetensors.torch.save({name: torch.ones(shape) for name, shape in SHAPES.items()})
FILE = "model-00001-of-00001.safetensors"
WORDS = (*words_of(CONFIG, *SCALINGS, INDEX), "llama", "qwen2", FILE, "../x", "sliding_attention")
BACKEND = choose_backend("cpu")


def target(data: bytes) -> None:
    choices = Choices(data)
    with tempfile.TemporaryDirectory(prefix="fuzz-model-") as name:
        folder = Path(name)
        fill(choices, folder)
        try:
            loaded = load_model(folder, torch.float32, BACKEND, choices.pick((None, 32)))
        except ValueError as error:
            assert str(folder) in str(error), error
            return
        assert loaded.max_model_len <= loaded.arch.max_position
        assert torch.isfinite(loaded.model.rotary.cos).all()


def fill(choices: Choices, folder: Path) -> None:
    config = CONFIG
    if choices.flag():
        config = CONFIG | {"rope_parameters": choices.changed(choices.pick(SCALINGS), WORDS)}
    write(choices, folder / "config.json", config)
    if choices.below(4) == 3:
        write(choices, folder / "generation_config.json", GENERATION)
    if choices.flag():
        index = INDEX | {"weight_map": dict.fromkeys(SHAPES, FILE)}
        write(choices, folder / "model.safetensors.index.json", index)
    (folder / FILE).write_bytes(choices.damaged(WEIGHTS))


def write(choices: Choices, path: Path, value: object) -> None:
    changed = choices.changed(value, WORDS)
    path.write_bytes(choices.damaged(json.dumps(changed).encode("utf-8", "replace")))
