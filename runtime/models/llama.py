"""Llama (SmolLM2, DeepSeek-R1-Distill-Llama): one bias flag for attention, one for the MLP.

Knows nothing of weight files or kernels.
"""

from collections.abc import Mapping
from typing import Any

from zipage_lang.runtime.models.config import ArchConfig, ModelFamily, read_common


def read_config(hf: Mapping[str, Any]) -> ArchConfig:
    """ArchConfig from the keys of a `config.json`."""
    has_bias = bool(hf.get("attention_bias", False))
    return read_common(
        hf, qkv_bias=has_bias, out_bias=has_bias, mlp_bias=bool(hf.get("mlp_bias", False))
    )


LLAMA = ModelFamily("llama", read_config, gguf_interleaves_rope=True)
