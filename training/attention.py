"""Causal attention inside each document of a packed batch, and the choice of a way to compute it.

Knows nothing of layers, weights or text.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""(q, k, v, starts, max_len) -> attended, of the shape of q.

q: [num_tokens, num_q_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; starts: int32
[max_documents + 1], document i holds the tokens from starts[i] up to starts[i + 1] (none, for those
behind the last); max_len: tokens of the longest document there may be.
"""


def attend_by_kernel(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, max_len: int) -> Tensor:
    """FlashAttention over all documents in one launch; CUDA and 16 bits only."""
    # (-1, 0) is torch's spelling of causal: all before, nothing after.
    return varlen_attn(q, k, v, starts, starts, max_len, max_len, window_size=(-1, 0))


def attend_by_kernel_repeated(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, max_len: int
) -> Tensor:
    """The same with each KV head written out for its group of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))  # [num_tokens, num_q_heads, D] each
    return attend_by_kernel(q, k, v, starts, max_len)


@torch.compiler.disable
def attend_by_document(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, max_len: int) -> Tensor:
    """One call per document, on any device: the specification, and slow on a card."""
    edges = starts.tolist()
    pieces = [
        _attend_one(q[start:end], k[start:end], v[start:end])
        for start, end in itertools.pairwise(edges)
        if end > start
    ]
    return torch.cat(pieces)


def choose_attention(device: torch.device, report: Callable[[str], None]) -> Attend:
    """The fastest way that gives the right outputs and gradients on this device."""
    if device.type != "cuda":
        return attend_by_document
    for attend in (attend_by_kernel, attend_by_kernel_repeated):
        try:
            error = difference_from_documents(attend, device, torch.bfloat16)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as problem:
            report(f"{attend.__name__} does not run here: {problem}")
            continue
        report(f"{attend.__name__} differs by {error:.4f} from one call per document")
        if error < 0.05:
            return attend
    return attend_by_document


def difference_from_documents(attend: Attend, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference in outputs and gradients, relative to their largest entry."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(heads: int) -> Tensor:
        shape = (700, heads, 64)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    inputs = [draw(6), draw(2), draw(2)]
    wanted_gradient = draw(6)
    starts = torch.tensor([0, 1, 130, 600, 700, 700, 700], dtype=torch.int32, device=device)
    results = []
    for way in (attend, attend_by_document):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = way(*leaves, starts, 700)
        output.backward(wanted_gradient)
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    pairs = zip(*results, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [len, num_q_heads, head_dim]; k, v: [len, num_kv_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, len, head_dim] each
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.squeeze(0).transpose(0, 1)  # [len, num_q_heads, head_dim]
