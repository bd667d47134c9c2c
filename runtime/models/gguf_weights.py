"""A GGUF file under Hugging Face's names: its config keys, its tensors, and q/k back in half order.

Knows nothing of layers or of how the file is laid out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zipage_lang.runtime.models.gguf_file import GgufFile

_GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class GgufWeights:
    """The tensors of one GGUF file, by their Hugging Face names."""

    def __init__(self, file: GgufFile, interleaved_heads: dict[str, int]) -> None:
        """`interleaved_heads`: llama.cpp name -> heads, where rotary pairs lie side by side."""
        self.path: Path = file.path
        self._file, self._interleaved_heads = file, interleaved_heads

    def __contains__(self, name: str) -> bool:
        return gguf_name(name) in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[gguf_name(name)].shape

    def read(self, name: str) -> Tensor:
        source = gguf_name(name)
        values = torch.from_numpy(self._file.read(source))
        num_heads = self._interleaved_heads.get(source.split(".")[-2])
        return values if num_heads is None else _halves(values, num_heads)


def gguf_name(name: str) -> str:
    """llama.cpp's name: `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _halves(values: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (0, D/2, 1, D/2 + 1, ...) back to (0, 1, ..., D - 1)."""
    pairs = values.unflatten(0, (num_heads, -1, 2))  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(values.shape)


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata under the keys of a `config.json`."""
    metadata, family = file.metadata, file.metadata.get("general.architecture")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{family}.{key}", default)

    embedding = file.tensors.get("token_embd.weight")
    return {
        "model_type": family,
        "vocab_size": embedding.shape[0] if embedding and embedding.shape else None,
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length") or _default_head_dim(get),
        "intermediate_size": get("feed_forward_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, get),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "eos_token_id": _eos_token_ids(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _default_head_dim(get: Callable[[str], Any]) -> int | None:
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    are_counts = all(isinstance(value, int) and value > 0 for value in (hidden_size, num_heads))
    return hidden_size // num_heads if are_counts else None


def _rope_scaling(file: GgufFile, get: Callable[[str], Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:  # how llama.cpp writes the llama3 scaling
        return {"rope_type": "divisors", "divisors": file.read("rope_freqs.weight").tolist()}
    kind = get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    settings = {
        "factor": get("rope.scaling.factor"),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        "attention_factor": get("rope.scaling.attn_factor"),
        "beta_fast": get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get("rope.scaling.yarn_beta_slow"),
    }
    return {"rope_type": kind} | {key: val for key, val in settings.items() if val is not None}


def _eos_token_ids(metadata: dict[str, Any]) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [metadata[key] for key in keys if key in metadata]
    are_ids = all(isinstance(token_id, int) for token_id in found)
    return sorted(set(found)) if are_ids else found  # what is no id is refused with the config
