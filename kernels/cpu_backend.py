"""The `cpu` backend: the plain-torch twins, vectorised over the whole batch.

Knows nothing of Triton or FlashInfer.
"""

import torch

from zipage_lang.kernels.reference import attention, fused_ops, kv_store


class CpuBackend:
    """Runs the whole engine with no GPU and no Triton."""

    name = "cpu"
    device = torch.device("cpu")

    plan_attention = staticmethod(attention.plan_attention)
    attention = staticmethod(attention.attention)
    store_kv = staticmethod(kv_store.store_kv)
    store_queries = staticmethod(kv_store.store_queries)
    copy_blocks = staticmethod(kv_store.copy_blocks)
    rms_norm = staticmethod(fused_ops.rms_norm)
    add_rms_norm = staticmethod(fused_ops.add_rms_norm)
    rope = staticmethod(fused_ops.rope)
    silu_mul = staticmethod(fused_ops.silu_mul)
