"""Packs whole blocks into lines of bytes, all layers side by side, and unpacks them: Triton.

Same acts as `reference/host_copy.py`, one launch a pool. Lines travel to and from host memory by
plain copies, which need no multiprocessor; this side of it is bound by the card's own memory.
Knows nothing of hosts, streams or who owns a block.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.reference.host_copy import line_bytes

_WORD = torch.int32  # any pool's block is a whole number of these
_TILE = 2048  # words a program moves at a time: 16 a thread at 4 warps


def pack_blocks(pools: Sequence[Tensor], block_ids: Tensor, lines: Tensor) -> None:
    """See the twin. Reads and writes each byte once."""
    _move(pools, block_ids, lines, pack=True)


def unpack_blocks(pools: Sequence[Tensor], block_ids: Tensor, lines: Tensor) -> None:
    """See the twin. Reads and writes each byte once."""
    _move(pools, block_ids, lines, pack=False)


def _move(pools: Sequence[Tensor], block_ids: Tensor, lines: Tensor, *, pack: bool) -> None:
    num_lines = len(block_ids)
    assert lines.shape == (num_lines, line_bytes(pools)), (lines.shape, num_lines)
    assert lines.is_contiguous(), lines.stride()
    assert block_ids.dtype == torch.int64, block_ids.dtype
    words, start = lines.view(_WORD), 0
    for pool in pools:
        start += _move_pool(pool, block_ids, words[:, start:], words.shape[1], pack=pack)


def _move_pool(pool: Tensor, block_ids: Tensor, part: Tensor, line_size: int, *, pack: bool) -> int:
    """Move one pool's part of the lines; returns how many words the part takes."""
    num_layers, row_bytes = pool.shape[0], pool[0, 0].nbytes
    assert pool[0, 0].is_contiguous(), (pool.shape, pool.stride())
    assert row_bytes % _WORD.itemsize == 0, f"blocks of {row_bytes} bytes"
    rows = pool.flatten(2).view(_WORD)  # [num_layers, num_blocks, row_size]
    row_size = rows.shape[2]
    if len(block_ids):
        _move_kernel[(len(block_ids), num_layers)](
            rows,
            block_ids,
            part,
            rows.stride(0),
            rows.stride(1),
            line_size,
            ROW=row_size,
            TILE=min(_TILE, triton.next_power_of_2(row_size)),
            PACK=pack,
            num_warps=4,
        )
    return line_bytes([pool]) // _WORD.itemsize


@triton.jit
def _move_kernel(
    rows,
    block_ids,
    part,
    layer_stride,
    block_stride,
    line_stride,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    PACK: tl.constexpr,
):
    line = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    block_id = tl.load(block_ids + line)
    in_pool = rows + layer * layer_stride + block_id * block_stride
    in_line = part + line.to(tl.int64) * line_stride + layer * ROW
    for first in range(0, ROW, TILE):
        word = first + tl.arange(0, TILE)
        inside = word < ROW
        if PACK:
            tl.store(in_line + word, tl.load(in_pool + word, mask=inside), mask=inside)
        else:
            tl.store(in_pool + word, tl.load(in_line + word, mask=inside), mask=inside)
