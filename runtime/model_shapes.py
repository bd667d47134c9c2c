"""Published model shapes by name, as their `config.json` gives them; for runs with random weights.

Knows nothing of weights, tensors or files.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
}

_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Sources: the config.json (and generation_config.json for end tokens) of Qwen/Qwen3-0.6B, -8B,
# -14B, -32B and deepseek-ai/DeepSeek-R1-Distill-Llama-8B on Hugging Face.
MODEL_SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-0.6b": _QWEN3
        | {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        },
        "qwen3-8b": _QWEN3
        | {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "intermediate_size": 12288,
        },
        "qwen3-14b": _QWEN3
        | {
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "intermediate_size": 17408,
        },
        "qwen3-32b": _QWEN3
        | {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "intermediate_size": 25600,
        },
        "deepseek-r1-distill-llama-8b": {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": _LLAMA_31_ROPE,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    }
)


def published_shape(name: str) -> dict[str, Any]:
    """The `config.json` keys of a known shape; a Hugging Face id's owner and case don't matter.

    Raises ValueError that names the known shapes.
    """
    key = name.rsplit("/", 1)[-1].lower()
    if key in MODEL_SHAPES:
        return dict(MODEL_SHAPES[key])
    near = difflib.get_close_matches(key, MODEL_SHAPES, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
        f"model {name!r} has no known shape for load_format='dummy'{hint}; known are "
        f"{', '.join(MODEL_SHAPES)}; a local folder with config.json works too"
    )
