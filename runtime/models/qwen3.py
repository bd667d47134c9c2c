"""Qwen3: RMSNorm on each head of q and k, and a head size that is free of the hidden size.

Knows nothing of weight files or kernels.
"""

from collections.abc import Mapping
from typing import Any

from zipage_lang.runtime.models.config import (
    ArchConfig,
    ModelFamily,
    read_common,
    refuse_sliding_window,
)

_DEFAULT_HEAD_DIM = 128


def read_config(hf: Mapping[str, Any]) -> ArchConfig:
    """ArchConfig from the keys of a `config.json`."""
    refuse_sliding_window(hf)
    has_bias = bool(hf.get("attention_bias", False))
    return read_common(
        hf,
        head_dim=hf.get("head_dim") or _DEFAULT_HEAD_DIM,
        qk_norm=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


QWEN3 = ModelFamily("qwen3", read_config, gguf_interleaves_rope=False)
