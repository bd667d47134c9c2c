"""The range of a slot's value: how far its largest and smallest dimension lie apart.

Knows nothing of requests, policies or which slots are kept.
"""

import torch
from torch import Tensor

from zipage_lang.kernels.reference.scores import gather_values


def value_range(kv_blocks: Tensor, slots: Tensor) -> Tensor:
    """max - min over the dimensions of each named slot's value. VaSE (arXiv 2606.03928).

    kv_blocks: [num_blocks, 2, block_size, num_kv_heads, head_dim], values at index 1 of axis 1.
    slots: int64 [num_rows, max_tail], padding -1.
    Returns float32 [num_rows, num_kv_heads, max_tail]; padding gets 0.
    """
    least, most = torch.aminmax(gather_values(kv_blocks, slots), dim=-1)
    return most - least
