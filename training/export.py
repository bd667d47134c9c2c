"""Writes a trained model as a folder that transformers and our engine load.

Knows nothing of training. Weights are bfloat16 safetensors in shards small enough to be sent one by
one, with transformers' names and index.
"""

import json
from pathlib import Path
from typing import Any

import torch
from reasoner import Reasoner, Shape
from safetensors.torch import save_file
from tokenizer import BOS_ID, EOS_ID, PAD_ID, write_tokenizer
from torch import Tensor

MAX_SHARD_BYTES = 14 * 2**20
TEMPERATURE = 0.6


def export_model(model: Reasoner, folder: Path) -> None:
    """Write weights, config, generation config and tokenizer into `folder`."""
    write_tokenizer(folder)
    _write_json(folder / "config.json", config_of(model.shape))
    _write_json(folder / "generation_config.json", _generation_config())
    tensors = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    _write_shards(tensors, folder)


def config_of(shape: Shape) -> dict[str, Any]:
    """`config.json` of transformers' Qwen3ForCausalLM."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "do_sample": True,
        "temperature": TEMPERATURE,
    }


def _write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and _num_bytes([*shards[-1].values(), tensor]) > MAX_SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    for old in folder.glob("*.safetensors"):
        old.unlink()
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    total = _num_bytes(list(tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
