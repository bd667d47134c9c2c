"""The `cpu` backend: the plain-torch twins, vectorised over the whole batch.

Knows nothing of Triton or FlashInfer.
"""

from typing import Any

import torch

from zipage_lang.kernels.reference import (
    attention,
    blend,
    compact,
    forecast,
    fused_ops,
    host_copy,
    kv_store,
    linear,
    ranges,
    sampling,
    scores,
    select,
    tails,
    tiers,
)
from zipage_lang.kernels.reference.residual_stream import ResidualStream


class CpuBackend:
    """Runs the whole engine with no GPU and no Triton."""

    name = "cpu"
    device = torch.device("cpu")
    # What strict mode replaces, each with its own kind of weight, stream and plan.
    prepare_linear: Any
    prepare_gated_linear: Any
    linear: Any
    normed_linear: Any
    normed_gated_linear: Any
    add_linear: Any
    plan_attention: Any = staticmethod(attention.plan_attention)
    attention: Any = staticmethod(attention.attention)
    open_stream: Any = staticmethod(ResidualStream)
    normed_stream: Any = staticmethod(ResidualStream.normed)
    rows_of_stream: Any = staticmethod(ResidualStream.of_rows)

    def __init__(self) -> None:
        products = linear.LinearProducts()
        self.prepare_linear, self.linear = products.prepare, products.linear
        self.prepare_gated_linear = products.prepare
        self.normed_linear = products.normed_linear
        self.normed_gated_linear = products.normed_gated_linear
        self.add_linear = products.add_linear

    @staticmethod
    def graph_planner(*_shape: int, max_rows: int, max_blocks: int) -> None:
        """The CPU has no graphs."""

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
    gather_keys = staticmethod(scores.gather_keys)
    gather_values = staticmethod(scores.gather_values)
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
