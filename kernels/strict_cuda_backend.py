"""The `cuda` backend of strict mode: what a row yields does not depend on the rows beside it.

Knows nothing of models, requests or plans.
"""

import torch
from torch import Tensor

from zipage_lang.kernels import sampling
from zipage_lang.kernels.cuda_backend import CudaBackend
from zipage_lang.kernels.strict_attention import StrictCardAttention, StrictGraphDecode
from zipage_lang.kernels.strict_products import StrictCardProducts


class StrictCudaBackend(CudaBackend):
    """The `cuda` backend with the acts replaced whose launch depends on the batch.

    The others have a program for each row already, of a shape that the row's size decides.
    """

    def __init__(self, _dtype: torch.dtype) -> None:
        """Any dtype that Triton multiplies."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        products = StrictCardProducts
        self.prepare_linear = self.prepare_gated_linear = products.prepare
        self.linear = products.linear
        self.normed_linear = products.normed_linear
        self.normed_gated_linear = products.normed_gated_linear
        self.add_linear = products.add_linear
        attention = StrictCardAttention(self.device)
        self.plan_attention, self.attention = attention.plan_attention, attention.attention

    @staticmethod
    def score_tokens(
        logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the usual one. Always by the kernel that also looks for the likeliest: whether some
        line asks for them must not choose another."""
        logprobs, ranks, top_ids, top_logprobs = sampling.score_tokens(
            logits, token_ids, max(1, num_top)
        )
        return logprobs, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top]

    def graph_planner(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        max_rows: int,
        max_blocks: int,
    ) -> StrictGraphDecode:
        """Decode attention that CUDA graphs may capture."""
        return StrictGraphDecode(
            self.device, num_kv_heads, block_size, max_rows=max_rows, max_blocks=max_blocks
        )
