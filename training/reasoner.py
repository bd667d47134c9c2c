"""The tiny reasoner as it is trained: a Qwen3 decoder over packed documents, in torch modules.

Parameters are float32 and carry the names of transformers' Qwen3Model; the computation runs in the
dtype of `compute_dtype`. Knows nothing of optimizers, batches or files.

Sources: Qwen3 technical report (arXiv 2505.09388, section 2) for QK-norm and GQA; RoFormer
(2104.09864) for the rotation.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from attention import Attend
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """All numbers that make one model of this architecture."""

    vocab_size: int
    hidden_size: int = 384
    num_layers: int = 8
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 1152
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    context: int = 4096  # tokens

    @property
    def num_layer_parameters(self) -> int:
        """Weights of all matrices inside layers; the rest is small."""
        heads = 2 * self.num_q_heads + 2 * self.num_kv_heads
        inner = heads * self.head_dim + 3 * self.intermediate_size
        return self.num_layers * self.hidden_size * inner


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)  # [..., 1]
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Projections and head norms; what lies between `heads` and `merge` is the caller's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        q_size = shape.num_q_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.head_dim, self.sizes = shape.head_dim, (q_size, kv_size, kv_size)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (rotated) and v, each [num_tokens, heads, head_dim], of x [num_tokens, hidden]."""
        merged = _project(x, self.q_proj, self.k_proj, self.v_proj)  # [num_tokens, sum(sizes)]
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in merged.split(self.sizes, dim=-1)
        )
        return (
            _rotate(self.q_norm(q), cos, sin),
            _rotate(self.k_norm(k), cos, sin),
            v.contiguous(),
        )

    def merge(self, attended: Tensor) -> Tensor:
        """[num_tokens, hidden] of attended heads [num_tokens, num_q_heads, head_dim]."""
        return _project(attended.flatten(-2), self.o_proj)


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = _project(x, self.gate_proj, self.up_proj).chunk(2, dim=-1)
        return _project(F.silu(gate) * up, self.down_proj)


class Layer(nn.Module):
    """One decoder layer over packed documents."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = GatedMlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.attend = attend

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, max_len: int) -> Tensor:
        q, k, v = self.self_attn.heads(self.input_layernorm(x), cos, sin)
        return self.finish(x, self.attend(q, k, v, starts, max_len))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from its input x and the attended heads."""
        x = x + self.self_attn.merge(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Reasoner(nn.Module):
    """Embedding, layers, final norm; the output head is the embedding again."""

    def __init__(self, shape: Shape, attend: Attend, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.compute_dtype = shape, compute_dtype
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, attend) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = _rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)  # [context, head_dim / 2]
        self.register_buffer("sin", sin, persistent=False)  # [context, head_dim / 2]

    def initialize(self, seed: int) -> None:
        """Normal weights; what is added to the residual stream starts small."""
        generator = torch.Generator().manual_seed(seed)
        into_stream = 0.02 / math.sqrt(2 * self.shape.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = into_stream if "o_proj" in name or "down_proj" in name else 0.02
                drawn = torch.randn(parameter.shape, generator=generator) * std
                parameter.data.copy_(drawn)

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Hidden states before the final norm, [num_tokens, hidden_size].

        tokens: int64 [num_tokens]; starts: int32 [max_documents + 1], as for `Attend`. Positions
        begin again at each document.
        """
        cos, sin = self.rotary(positions_of(starts, tokens.shape[0])[:, None])
        x = self.embed_tokens(tokens).to(self.compute_dtype)  # [num_tokens, hidden_size]
        for layer in self.layers:
            x = layer(x, cos, sin, starts, self.shape.context)
        return x

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [...], each [..., head_dim / 2] in the compute dtype."""
        return self.cos[positions].to(self.compute_dtype), self.sin[positions].to(
            self.compute_dtype
        )

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats of each target, float32 [num_tokens]."""
        return F.cross_entropy(self.logits(hidden), targets, reduction="none")

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_tokens, vocab_size]."""
        head = self.embed_tokens.weight.to(hidden.dtype)
        return F.linear(self.norm(hidden), head).float()


def documents_of(starts: Tensor, num_tokens: int) -> Tensor:
    """The document that each token is of, int64 [num_tokens]."""
    places = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
    return torch.bucketize(places, starts, right=True) - 1


def positions_of(starts: Tensor, num_tokens: int) -> Tensor:
    """Each token's place in its own document, int64 [num_tokens]."""
    first = starts[documents_of(starts, num_tokens)]  # [num_tokens]
    return torch.arange(num_tokens, device=starts.device) - first


def _project(x: Tensor, *linears: nn.Linear) -> Tensor:
    """Several projections of one input as one product, side by side in the last axis."""
    weights = [linear.weight.to(x.dtype) for linear in linears]
    return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2); x [num_tokens, heads, head_dim]."""
    low, high = x.chunk(2, dim=-1)  # [num_tokens, heads, head_dim / 2] each
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [context, head_dim / 2]."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.arange(shape.context).float()[:, None] / shape.rope_theta**exponents
    return angles.cos(), angles.sin()
