"""Attention over a row's own slots and over the prefix it shares, made one: plain torch.

Knows nothing of which rows share what, or how the two parts were computed.
"""

import math

import torch
from torch import Tensor


def merge_parts(out: Tensor, lse: Tensor, has_shared: Tensor, lse_out: Tensor) -> None:
    """Merge the second half of the rows into the first, where a row has a shared part.

    With log-sum-exps a and b, base 2, of two disjoint sets of slots, attention over both is
    (2^a * out_a + 2^b * out_b) / (2^a + 2^b) and its log-sum-exp log2(2^a + 2^b).

    Args:
        out: [2 * num_rows, num_heads, head_dim], merged in place; row num_rows + i is the shared
            part of row i. It may hold anything, even NaN, where there is none.
        lse: float32 [2 * num_rows, num_heads], base 2.
        has_shared: int32 [num_rows], 0 or 1.
        lse_out: float32 [num_rows, num_heads]; gets every row's log-sum-exps.
    """
    num_rows = len(has_shared)
    rows = has_shared.nonzero().flatten()  # [num_shared]
    parts = lse.view(2, num_rows, -1)[:, rows]  # [2, num_shared, num_heads]
    weights = torch.softmax(parts * math.log(2), dim=0).unsqueeze(-1)
    wide = out.view(2, num_rows, *out.shape[1:])[:, rows].to(weights.dtype)
    out[rows] = (wide * weights).sum(0).to(out.dtype)
    lse_out.copy_(lse[:num_rows])
    lse_out[rows] = torch.logaddexp2(parts[0], parts[1])
