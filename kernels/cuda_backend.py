"""The `cuda` backend: FlashInfer attention, our own products and cuBLAS, Triton kernels.

Knows nothing of models, requests or plans.
"""

from typing import Any

import torch

from zipage_lang.kernels import (
    blend,
    compact,
    forecast,
    fused_ops,
    host_copy,
    kv_store,
    ranges,
    sampling,
    scores,
    select,
    tails,
    tiers,
)
from zipage_lang.kernels.attention import FlashInferAttention
from zipage_lang.kernels.backend import GraphPlanner
from zipage_lang.kernels.dense_attention import DenseAttention
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.graph_decode import GraphDecode
from zipage_lang.kernels.products import CardProducts
from zipage_lang.kernels.reference import scores as reference_scores
from zipage_lang.kernels.residual_stream import ResidualStream

FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)


class CudaBackend:
    """Runs the engine on one card. float32 attends in plain torch: for tests, not for speed."""

    name = "cuda"
    # What strict mode replaces, each with its own kind of weight and plan.
    prepare_linear: Any
    prepare_gated_linear: Any
    linear: Any
    normed_linear: Any
    normed_gated_linear: Any
    add_linear: Any
    plan_attention: Any
    attention: Any

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of weights and KV cache."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        uses_flashinfer = dtype in FLASHINFER_DTYPES
        self._kernels = (
            FlashInferAttention(self.device, dtype)
            if uses_flashinfer
            else DenseAttention(self.device)
        )
        products = CardProducts(dtype)
        self.prepare_linear, self.linear = products.prepare, products.linear
        self.prepare_gated_linear = products.prepare_gated
        self.normed_linear = products.normed_linear
        self.normed_gated_linear = products.normed_gated_linear
        self.add_linear = products.add_linear
        self.plan_attention = self._kernels.plan_attention
        self.attention = self._kernels.attention

    def graph_planner(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        max_rows: int,
        max_blocks: int,
    ) -> GraphPlanner | None:
        """Decode attention that CUDA graphs may capture; None where this dtype has none."""
        if not isinstance(self._kernels, FlashInferAttention):
            return None
        heads = Heads(num_q_heads, num_kv_heads, head_dim, block_size)
        return GraphDecode(self._kernels, heads, max_rows=max_rows, max_blocks=max_blocks)

    open_stream = staticmethod(ResidualStream)
    normed_stream = staticmethod(ResidualStream.normed)
    rows_of_stream = staticmethod(ResidualStream.of_rows)
    store_kv = staticmethod(kv_store.store_kv)
    store_lse = staticmethod(kv_store.store_lse)
    copy_blocks = staticmethod(kv_store.copy_blocks)
    pack_blocks = staticmethod(host_copy.pack_blocks)
    unpack_blocks = staticmethod(host_copy.unpack_blocks)
    rms_norm = staticmethod(fused_ops.rms_norm)
    add_rms_norm = staticmethod(fused_ops.add_rms_norm)
    rope = staticmethod(fused_ops.rope)
    silu_mul = staticmethod(fused_ops.silu_mul)
    qk_norm_rope_store = staticmethod(fused_ops.qk_norm_rope_store)
    random_uniform = staticmethod(sampling.random_uniform)
    penalize = staticmethod(sampling.penalize)
    draw_tokens = staticmethod(sampling.draw_tokens)
    draw_filtered_tokens = staticmethod(sampling.draw_filtered_tokens)
    draw_rows = staticmethod(sampling.draw_rows)
    score_tokens = staticmethod(sampling.score_tokens)
    gather_keys = staticmethod(reference_scores.gather_keys)
    gather_values = staticmethod(reference_scores.gather_values)
    attention_mass = staticmethod(scores.attention_mass)
    lightning_similarity = staticmethod(scores.lightning_similarity)
    flash_similarity = staticmethod(scores.flash_similarity)
    mass_and_similarity = staticmethod(scores.mass_and_similarity)
    combine_scores = staticmethod(scores.combine_scores)
    protect_slots = staticmethod(select.protect_slots)
    select_top_k = staticmethod(select.select_top_k)
    fill_holes = staticmethod(compact.fill_holes)
    expand_tails = staticmethod(tails.expand_tails)
    compact_blend = staticmethod(blend.compact_blend)
    compact_tiers = staticmethod(tiers.compact_tiers)
    value_range = staticmethod(ranges.value_range)
    forecast_scores = staticmethod(forecast.forecast_scores)
