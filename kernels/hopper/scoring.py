"""Attention mass and redundancy of bfloat16 tails by the Hopper kernel, each key read once.

`kernels/scores.py` calls it where it `takes` the sizes. Knows nothing of requests, policies or
which slots are kept.
"""

import functools
import math

import torch
from torch import Tensor

from zipage_lang.kernels.backend import TailQueries
from zipage_lang.kernels.hopper.library import check, is_available, load

MAX_CHUNK = 256
MAX_COLUMNS = 64  # queries times the group, padded to a power of two
_GROUPS = (1, 2, 4, 8)
_HEAD_DIMS = (64, 128)
_LOG2_E = math.log2(math.e)


def takes(kv_blocks: Tensor, queries: TailQueries, chunk: int) -> bool:
    """Whether the kernel is made for these sizes and this card has it; it may build the library."""
    num_kv_heads, head_dim = kv_blocks.shape[3:]
    group = queries.ring.shape[1] // num_kv_heads
    padded = 1 << (group - 1).bit_length()
    fits = (
        kv_blocks.dtype == torch.bfloat16
        and head_dim in _HEAD_DIMS
        and padded in _GROUPS
        and padded * queries.ring_slots.shape[1] <= MAX_COLUMNS
        and chunk <= MAX_CHUNK
    )
    return fits and kv_blocks.is_cuda and _is_there()


def mass_and_similarity(
    kv_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    queries: TailQueries,
    scale: float,
    chunk: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """See the twin in `kernels/reference/scores.py`. One launch of two CTAs per SM.

    Reads each key once, writes 8 bytes a key and head. Counted at a chunk of 256 keys of 128
    dimensions where none is similar: 64 KiB of keys from memory and 16 of queries from the L2,
    some 1,800 instructions in each of 8 warps, 8.1 MFMA of products. Seen on an H200: 103 to 116 us
    for a request of 36 layers, 8 heads and 2,304 keys where none is similar, 140 to 170 else.

    All tensors contiguous, keys and queries aligned to 16 bytes, of sizes that `takes` takes.
    Raises RuntimeError where the launch fails.
    """
    assert positions.numel() < 2**31, f"{positions.shape} does not fit 32-bit numbers"
    assert kv_blocks.data_ptr() % 16 == 0, kv_blocks.data_ptr()
    assert queries.ring.data_ptr() % 16 == 0, queries.ring.data_ptr()
    _, _, block_size, num_kv_heads, head_dim = kv_blocks.shape
    mass = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    similarity = torch.empty_like(mass)
    tensors = (kv_blocks, slots, positions, *queries, mass, similarity)
    code = load().zl_scoring(
        *(tensor.data_ptr() for tensor in tensors),
        slots.shape[0],
        num_kv_heads,
        head_dim,
        queries.ring.shape[1] // num_kv_heads,
        queries.ring_slots.shape[1],
        slots.shape[1],
        chunk,
        block_size,
        scale * _LOG2_E,
        threshold,
        torch.cuda.current_stream(positions.device).cuda_stream,
    )
    check(code)
    return mass, similarity


@functools.cache
def _is_there() -> bool:
    return is_available()
