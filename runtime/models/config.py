"""ArchConfig: a decoder's shape and settings, read from a Hugging Face style config.

Knows nothing of files, tensors or kernels.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_POSITION = 2**24  # float32 holds every whole number up to here, and angles are float32
MAX_COUNT = 2**31 - 1
MIN_SETTING, MAX_SETTING = 1e-12, 1e12  # of real numbers: what float32 computes with safely


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchConfig:
    """All that distinguishes one decoder-only transformer of this family from another."""

    architecture: str  # "llama", "qwen2", "qwen3"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # as in config.json; None: plain RoPE
    max_position: int  # context in tokens the model was made for
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r:.80} must be a whole number, at least 1")
            if value > most:
                raise ValueError(f"{name}={value!r:.80} must be at most {most}")
        if not 1 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_q_heads} must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")


_COUNTS = {  # and the most of each: far beyond any model, and refused before it is allocated
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "num_layers": 2**12,
    "num_q_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**21,
    "max_position": MAX_POSITION,
}
_ROPE_NUMBERS = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
}


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """What a model file states: how its config reads and how llama.cpp stores its weights."""

    name: str  # `model_type` in config.json and `general.architecture` in GGUF
    read_config: Callable[[Mapping[str, Any]], ArchConfig]
    gguf_interleaves_rope: bool  # GGUF holds q and k with rotary pairs side by side


def read_common(hf: Mapping[str, Any], **differences: Any) -> ArchConfig:
    """The part of a config that all families share; `differences` are added or win.

    Args:
        hf: the keys of a `config.json`, in either the transformers 4 or 5 spelling of RoPE.

    Raises ValueError for a missing key or a feature that is not supported.
    """
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported, only 'silu'")
    num_q_heads = _count(hf, "num_attention_heads")
    theta, scaling = _read_rope(hf)
    fields: dict[str, Any] = {
        "architecture": _need(hf, "model_type"),
        "vocab_size": _need(hf, "vocab_size"),
        "hidden_size": _need(hf, "hidden_size"),
        "num_layers": _need(hf, "num_hidden_layers"),
        "num_q_heads": num_q_heads,
        "num_kv_heads": hf.get("num_key_value_heads") or num_q_heads,
        "head_dim": hf.get("head_dim") or _count(hf, "hidden_size") // num_q_heads,
        "intermediate_size": _need(hf, "intermediate_size"),
        "rms_norm_eps": _positive("rms_norm_eps", hf.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position": _need(hf, "max_position_embeddings"),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "eos_token_ids": _as_ids(hf.get("eos_token_id")),
        "bos_token_id": next(iter(_as_ids(hf.get("bos_token_id"))), None),
    }
    return ArchConfig(**(fields | differences))


def refuse_sliding_window(hf: Mapping[str, Any]) -> None:
    """Raise ValueError when some layers would attend to a window only."""
    kinds = hf.get("layer_types") or ()
    if hf.get("use_sliding_window") and (not kinds or "sliding_attention" in kinds):
        raise ValueError("use_sliding_window=true is not supported; set it to false in config.json")


def _need(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"the config lacks {key!r}")
    return hf[key]


def _count(hf: Mapping[str, Any], key: str) -> int:
    value = _need(hf, key)
    if not _is_whole(value, 1):
        raise ValueError(f"{key}={value!r:.80} must be a whole number, at least 1")
    return int(value)


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_COUNT


def _positive(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not MIN_SETTING <= value <= MAX_SETTING:
        raise ValueError(
            f"{name}={value!r:.80} must be a number from {MIN_SETTING:g} to {MAX_SETTING:g}"
        )
    return float(value)


def _as_ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(_is_whole(token_id, 0) for token_id in ids):
        raise ValueError(f"{value!r:.80} must be a token id, or a list of them")
    return ids


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """(theta, scaling); transformers 5 keeps both in `rope_parameters`, 4 side by side."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling={given!r:.80} must be an object")
    rope = {name: value for name, value in given.items() if value is not None}
    theta = _positive("rope_theta", rope.pop("rope_theta", None) or hf.get("rope_theta") or 1e4)
    kinds = [rope.pop(name, None) for name in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    if not isinstance(kind, str):
        raise ValueError(f"rope_type={kind!r:.80} must be the name of a scaling")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    for name in _ROPE_NUMBERS & rope.keys():
        rope[name] = _positive(f"rope {name}", rope[name])
    if "divisors" in rope:
        rope["divisors"] = _divisors(rope["divisors"])
    return theta, None if kind == "default" else {**rope, "rope_type": kind}


def _divisors(values: Any) -> list[float]:
    if not isinstance(values, list):
        raise ValueError(f"rope divisors={values!r:.80} must be a list of numbers")
    return [_positive("a rope divisor", value) for value in values]
