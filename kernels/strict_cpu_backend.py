"""The `cpu` backend of strict mode: what a row yields does not depend on the rows beside it.

Knows nothing of Triton or FlashInfer.
"""

from zipage_lang.kernels.cpu_backend import CpuBackend
from zipage_lang.kernels.reference import strict_ops, strict_sampling
from zipage_lang.kernels.reference.strict_attention import StrictAttention
from zipage_lang.kernels.reference.strict_linear import StrictProducts


class StrictCpuBackend(CpuBackend):
    """The `cpu` backend with the acts of a forward pass and of sampling replaced.

    What scores and moves slots stays: it works on one request at a time in strict mode.
    """

    def __init__(self) -> None:
        products = StrictProducts()
        self.prepare_linear, self.linear = products.prepare, products.linear
        self.prepare_gated_linear = products.prepare
        self.normed_linear = products.normed_linear
        self.normed_gated_linear = products.normed_gated_linear
        self.add_linear = products.add_linear
        attention = StrictAttention()
        self.plan_attention, self.attention = attention.plan_attention, attention.attention

    open_stream = staticmethod(strict_ops.StrictStream)
    normed_stream = staticmethod(strict_ops.StrictStream.normed)
    rows_of_stream = staticmethod(strict_ops.StrictStream.of_rows)
    qk_norm_rope_store = staticmethod(strict_ops.qk_norm_rope_store)
    rms_norm = staticmethod(strict_ops.rms_norm)
    rope = staticmethod(strict_ops.rope)
    draw_rows = staticmethod(strict_sampling.draw_rows)
    score_tokens = staticmethod(strict_sampling.score_tokens)
