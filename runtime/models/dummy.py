"""Random weights in any model's shape, made where they are used; for measuring, not for text.

Knows nothing of layers or files.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from zipage_lang.runtime.models.config import ArchConfig

DEFAULT_STD = 0.02  # what these models are initialised with; bfloat16 stays finite


class RandomWeights:
    """Named tensors drawn from a normal distribution; norms are one. Equal seeds, equal weights.

    A WeightSource. Each tensor has its own seed, so the order of reading does not matter; what is
    drawn on one device differs from what is drawn on another.
    """

    def __init__(
        self,
        arch: ArchConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
        std: float = DEFAULT_STD,
    ) -> None:
        self.path = Path(f"random-{arch.architecture}")
        self._shapes = weight_shapes(arch)
        self._dtype, self._device = dtype, device
        self._seed, self._std = seed, std

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """The tensor, already on the device and in the dtype it is wanted in."""
        shape, dtype, device = self._shapes[name], self._dtype, self._device
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        generator = torch.Generator(device)
        # The CPU generator heeds 32 bits of a seed only.
        generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        drawn = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        return drawn.mul_(self._std)


def weight_shapes(arch: ArchConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor of a model by its Hugging Face name; linear weights [out_size, in_size]."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, arch.hidden_size),
        "model.norm.weight": (arch.hidden_size,),
    }
    if not arch.tie_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden_size)
    for index in range(arch.num_layers):
        for name, shape in _layer_shapes(arch).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def _layer_shapes(arch: ArchConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_size, kv_size = arch.num_q_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if arch.qk_norm:
        shapes["self_attn.q_norm.weight"] = (arch.head_dim,)
        shapes["self_attn.k_norm.weight"] = (arch.head_dim,)
    linears = {
        "self_attn.q_proj": (q_size, hidden, arch.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, arch.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, arch.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, arch.out_bias),
        "mlp.gate_proj": (inner, hidden, arch.mlp_bias),
        "mlp.up_proj": (inner, hidden, arch.mlp_bias),
        "mlp.down_proj": (hidden, inner, arch.mlp_bias),
    }
    for name, (out_size, in_size, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out_size, in_size)
        if has_bias:
            shapes[f"{name}.bias"] = (out_size,)
    return shapes
