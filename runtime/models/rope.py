"""Rotary tables: the cosine and sine of every position's angles, with the known scalings.

Knows nothing of heads or layers.

Sources: RoFormer (arXiv 2104.09864, eq. 15) for the angles; linear position interpolation
(2306.15595); YaRN (2309.00071, section 3.2 to 3.4); Llama 3.1's wavelength bands.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zipage_lang.runtime.models.config import ArchConfig


class RotaryTable:
    """cos and sin of all positions up to max_model_len."""

    cos: Tensor  # [max_model_len, head_dim / 2]
    sin: Tensor  # [max_model_len, head_dim / 2]

    def __init__(
        self, arch: ArchConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inv_freq, amplitude = rotary_frequencies(arch, max_model_len)
        angles = torch.arange(max_model_len).float()[:, None] * inv_freq  # [max_model_len, D / 2]
        self.cos = (angles.cos() * amplitude).to(device, dtype)
        self.sin = (angles.sin() * amplitude).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [num_tokens, head_dim / 2] of int64 positions [num_tokens]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotary_frequencies(arch: ArchConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Angle per position, float32 [head_dim / 2], and the factor on cos and sin.

    Raises ValueError for a scaling that is not known or lacks a setting.
    """
    exponents = torch.arange(0, arch.head_dim, 2).float() / arch.head_dim  # [head_dim / 2]
    inv_freq = 1.0 / arch.rope_theta**exponents  # [head_dim / 2]
    scaling = arch.rope_scaling
    if scaling is None:
        return inv_freq, 1.0
    inv_freq, amplitude = _scaled(inv_freq, arch, scaling, max_model_len)
    if not (torch.isfinite(inv_freq).all() and math.isfinite(amplitude)):
        raise ValueError(f"rope scaling {dict(scaling)!r:.200} gives angles that are not finite")
    return inv_freq, amplitude


def _scaled(
    inv_freq: Tensor, arch: ArchConfig, scaling: Mapping[str, Any], max_model_len: int
) -> tuple[Tensor, float]:
    kind = scaling["rope_type"]
    try:
        if kind == "linear":
            return inv_freq / scaling["factor"], 1.0
        if kind == "llama3":
            return _llama3(inv_freq, scaling), 1.0
        if kind == "yarn":
            return _yarn(inv_freq, arch, scaling)
        if kind == "divisors":
            return _divided(inv_freq, torch.tensor(scaling["divisors"])), 1.0
    except KeyError as error:
        raise ValueError(f"rope scaling {kind!r} lacks the setting {error}") from None
    if kind == "dynamic":
        return _dynamic(inv_freq, arch, max_model_len), 1.0
    raise ValueError(
        f"rope scaling {kind!r} is not supported; known are linear, dynamic, yarn and llama3"
    )


def _divided(inv_freq: Tensor, divisors: Tensor) -> Tensor:
    if divisors.shape != inv_freq.shape:
        raise ValueError(f"{divisors.numel()} rope divisors for {inv_freq.numel()} angles")
    return inv_freq / divisors


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # [D / 2]
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)  # [D / 2]
    return inv_freq * (kept_share + (1 - kept_share) / scaling["factor"])


def _yarn(inv_freq: Tensor, arch: ArchConfig, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Dimensions that turn often are kept, slow ones interpolated, with a ramp between."""
    original_len = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or arch.max_position / original_len

    def dimension_turning(num_turns: float) -> float:
        wavelength_ratio = original_len / (num_turns * 2 * math.pi)
        return arch.head_dim * math.log(wavelength_ratio) / (2 * math.log(arch.rope_theta))

    first = dimension_turning(scaling.get("beta_fast") or 32)
    last = dimension_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, arch.head_dim - 1)
    last = last + 0.001 if first == last else last
    ramp = (torch.arange(arch.head_dim // 2).float() - first) / (last - first)  # [head_dim / 2]
    slowed_share = ramp.clamp(0, 1)
    scaled = inv_freq * (1 - slowed_share) + inv_freq / factor * slowed_share
    return scaled, _yarn_amplitude(factor, scaling)


def _yarn_amplitude(factor: float, scaling: Mapping[str, Any]) -> float:
    """The attention temperature of YaRN, applied to cos and sin."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)


def _dynamic(inv_freq: Tensor, arch: ArchConfig, max_model_len: int) -> Tensor:
    """Dynamic NTK is plain RoPE up to the trained length; past it, it would re-turn cached keys."""
    if max_model_len > arch.max_position:
        raise ValueError(
            f"max_model_len={max_model_len}: dynamic rope scaling past the trained "
            f"{arch.max_position} tokens would change keys that are already cached; "
            f"set max_model_len={arch.max_position} or less"
        )
    return inv_freq
