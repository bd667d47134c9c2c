"""The layers that all model families share: attention block, gated MLP.

Knows nothing of weight files or of what a request is.
"""

import dataclasses
from typing import Any

from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache


@dataclasses.dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm over each head of q and k."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]
    eps: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Projects, rotates, stores K and V, attends, and keeps the queries that scoring asks for.

    What comes of it goes through `out` into the stream: of all tokens, or of those still wanted.
    """

    layer: int
    qkv: Any  # from Backend.prepare_linear with its norm; `out` and the MLP's `down` without
    norms: HeadNorms | None
    out: Any

    def __call__(
        self,
        stream: Any,
        rotary: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: KVCache,
        backend: Backend,
        lse_out: Tensor | None,
    ) -> Tensor:
        """Read the residual stream and write into the cache's layer.

        lse_out: float32 [num_layers, num_tokens, num_q_heads]; this layer's part gets the
            log-sum-exps. None: they are not wanted.

        Returns what `out` takes, [num_tokens, num_q_heads * head_dim].
        """
        layer_kv = cache.kv[self.layer]
        norms = self.norms
        q = backend.qk_norm_rope_store(
            backend.normed_linear(stream, self.qkv),  # [num_tokens, all heads * head_dim]
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            0.0 if norms is None else norms.eps,
            *rotary,
            layer_kv,
            batch.slots,
            None if batch.ring_slots is None else cache.queries[self.layer],
            batch.ring_slots,
        )  # [num_tokens, num_q_heads, head_dim]
        scale = q.shape[2] ** -0.5
        lse = None if lse_out is None else lse_out[self.layer]
        out, _ = backend.attention(q, layer_kv, batch.attention_plan, scale, lse is not None, lse)
        return out.flatten(1)


@dataclasses.dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    gate_up: Any  # from Backend.prepare_gated_linear with its norm
    down: Any

    def __call__(self, stream: Any, backend: Backend) -> None:
        """Read the residual stream and add to it."""
        gated = backend.normed_gated_linear(stream, self.gate_up)  # [num_tokens, intermediate_size]
        backend.add_linear(stream, gated, self.down)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Attention and MLP, each behind a norm that its first weight was prepared with."""

    attention: AttentionBlock
    mlp: GatedMlp

    def __call__(
        self,
        stream: Any,
        rotary: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: KVCache,
        backend: Backend,
        lse_out: Tensor | None,
        wanted: Tensor | None,
    ) -> Any:
        """Read the residual stream, write into the cache's layer, add to the stream.

        Args:
            lse_out: as for `AttentionBlock`.
            wanted: int64 [num_wanted], the tokens to go on with behind the attention; None: all.
                The others are only attended to.

        Returns the stream of the tokens to go on with.
        """
        attended = self.attention(stream, rotary, batch, cache, backend, lse_out)
        if wanted is not None:
            stream = backend.rows_of_stream(stream, wanted)
            attended = attended.index_select(0, wanted)  # [num_wanted, num_q_heads * head_dim]
        if len(attended) > 0:
            backend.add_linear(stream, attended, self.attention.out)
            self.mlp(stream, backend)
        return stream
