"""Builds a Decoder from named weights: checks shapes, merges projections, prepares them.

Knows nothing of file formats.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.models.config import ArchConfig
from zipage_lang.runtime.models.decoder import Decoder
from zipage_lang.runtime.models.layers import (
    AttentionBlock,
    DecoderLayer,
    GatedMlp,
    HeadNorms,
)
from zipage_lang.runtime.models.rope import RotaryTable
from zipage_lang.runtime.models.weights import WeightSource

_START = logging.getLogger("zipage.start")


def assemble_decoder(
    arch: ArchConfig,
    source: WeightSource,
    dtype: torch.dtype,
    backend: Backend,
    max_model_len: int,
) -> Decoder:
    """The model with its weights in `dtype` on the backend's device.

    Raises ValueError that names the file for a tensor that is missing or has another shape.
    """
    weights = _Weights(source, dtype, backend)
    table_shape = (arch.vocab_size, arch.hidden_size)
    embedding = weights.take("model.embed_tokens.weight", table_shape)
    head = embedding if arch.tie_embeddings else weights.take("lm_head.weight", table_shape)
    return Decoder(
        arch,
        backend,
        embedding=embedding,
        layers=tuple(_layers(arch, weights)),
        final_norm=weights.take("model.norm.weight", (arch.hidden_size,)),
        head=backend.prepare_linear(head, None),
        rotary=RotaryTable(arch, max_model_len, dtype, backend.device),
    )


def _layers(arch: ArchConfig, weights: "_Weights") -> Iterator[DecoderLayer]:
    for index in range(arch.num_layers):
        _START.info("loading weights", extra={"count": (index, arch.num_layers)})
        yield _layer(arch, weights, index)


class _Weights:
    """Takes tensors from a source by name and expected shape."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, backend: Backend) -> None:
        self._source, self._dtype, self._backend = source, dtype, backend

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, contiguous, in our dtype and on our device."""
        self._check(name, shape)
        return self._source.read(name).to(self._backend.device, self._dtype).contiguous()

    def take_linear(
        self,
        prefix: str,
        parts: dict[str, int],
        in_size: int,
        *,
        has_bias: bool,
        norm: Tensor | None = None,
    ) -> Any:
        """Projections of one input, merged and prepared.

        Args:
            parts: their names and output sizes.
            norm: [in_size], the weight of the norm of that input.
        """
        weight, bias = self._merged(prefix, parts, in_size, has_bias=has_bias)
        return self._backend.prepare_linear(weight, bias, norm)

    def take_gated_linear(
        self,
        prefix: str,
        parts: dict[str, int],
        in_size: int,
        *,
        has_bias: bool,
        norm: Tensor,
    ) -> Any:
        """The same for two projections of equal size, of which the first gates the second."""
        weight, bias = self._merged(prefix, parts, in_size, has_bias=has_bias)
        return self._backend.prepare_gated_linear(weight, bias, norm)

    def _merged(
        self, prefix: str, parts: dict[str, int], in_size: int, *, has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        for part, size in parts.items():  # before anything of that size is allocated
            self._check(f"{prefix}.{part}.weight", (size, in_size))
            if has_bias:
                self._check(f"{prefix}.{part}.bias", (size,))
        total = sum(parts.values())
        weight = self._empty(total, in_size)  # [total, in_size]
        bias = self._empty(total) if has_bias else None  # [total]
        start = 0
        for part, size in parts.items():
            rows = slice(start, start + size)
            name = f"{prefix}.{part}"
            weight[rows] = self._source.read(f"{name}.weight")
            if bias is not None:
                bias[rows] = self._source.read(f"{name}.bias")
            start += size
        return weight, bias

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._backend.device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        path = self._source.path
        if name not in self._source:
            raise ValueError(
                f"{path}: tensor {name!r} is missing; the weights don't belong to this config"
            )
        if self._source.shape(name) != shape:
            raise ValueError(
                f"{path}: tensor {name!r} has shape {self._source.shape(name)}, the config asks "
                f"for {shape}; the weights don't belong to this config"
            )


def _layer(arch: ArchConfig, weights: _Weights, index: int) -> DecoderLayer:
    return DecoderLayer(attention=_attention(arch, weights, index), mlp=_mlp(arch, weights, index))


def _attention(arch: ArchConfig, weights: _Weights, index: int) -> AttentionBlock:
    prefix = f"model.layers.{index}.self_attn"
    norm = weights.take(f"model.layers.{index}.input_layernorm.weight", (arch.hidden_size,))
    q_size, kv_size = arch.num_q_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv_parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    return AttentionBlock(
        layer=index,
        qkv=weights.take_linear(
            prefix, qkv_parts, arch.hidden_size, has_bias=arch.qkv_bias, norm=norm
        ),
        norms=_head_norms(arch, weights, prefix) if arch.qk_norm else None,
        out=weights.take_linear(
            prefix, {"o_proj": arch.hidden_size}, q_size, has_bias=arch.out_bias
        ),
    )


def _head_norms(arch: ArchConfig, weights: _Weights, prefix: str) -> HeadNorms:
    return HeadNorms(
        q=weights.take(f"{prefix}.q_norm.weight", (arch.head_dim,)),
        k=weights.take(f"{prefix}.k_norm.weight", (arch.head_dim,)),
        eps=arch.rms_norm_eps,
    )


def _mlp(arch: ArchConfig, weights: _Weights, index: int) -> GatedMlp:
    layer = f"model.layers.{index}"
    prefix = f"{layer}.mlp"
    norm = weights.take(f"{layer}.post_attention_layernorm.weight", (arch.hidden_size,))
    inner = arch.intermediate_size
    parts = {"gate_proj": inner, "up_proj": inner}
    return GatedMlp(
        gate_up=weights.take_gated_linear(
            prefix, parts, arch.hidden_size, has_bias=arch.mlp_bias, norm=norm
        ),
        down=weights.take_linear(
            prefix, {"down_proj": arch.hidden_size}, inner, has_bias=arch.mlp_bias
        ),
    )
