"""Qwen2 (DeepSeek-R1-Distill-Qwen): biases on q, k and v only.

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


def read_config(hf: Mapping[str, Any]) -> ArchConfig:
    """ArchConfig from the keys of a `config.json`."""
    refuse_sliding_window(hf)
    return read_common(hf, qkv_bias=True)


QWEN2 = ModelFamily("qwen2", read_config, gguf_interleaves_rope=False)
