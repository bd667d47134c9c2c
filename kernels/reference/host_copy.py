"""Packs whole blocks into lines of bytes, all layers side by side, and unpacks them: plain torch.

A line is what goes to host memory in one piece. It holds, pool after pool and layer after layer,
the bytes of one block. Knows nothing of hosts, streams or who owns a block.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor


def line_bytes(pools: Sequence[Tensor]) -> int:
    """Bytes of a line: one block of every layer of every pool, pools [num_layers, num_blocks, ...].

    Each pool's part starts at a multiple of 16 bytes.
    """
    return sum(_part_bytes(pool) for pool in pools)


def pack_blocks(pools: Sequence[Tensor], block_ids: Tensor, lines: Tensor) -> None:
    """Write blocks into lines.

    Args:
        pools: tensors [num_layers, num_blocks, ...], contiguous from the third axis on.
        block_ids: int64 [num_lines].
        lines: uint8 [num_lines, line_bytes], contiguous; written.
    """
    for pool, part in _parts(pools, lines):
        part.copy_(pool.index_select(1, block_ids).transpose(0, 1))


def unpack_blocks(pools: Sequence[Tensor], block_ids: Tensor, lines: Tensor) -> None:
    """Write lines back into blocks; the reverse of `pack_blocks`.

    Args:
        pools: as for `pack_blocks`; written.
        block_ids: int64 [num_lines], distinct.
        lines: uint8 [num_lines, line_bytes], contiguous.
    """
    for pool, part in _parts(pools, lines):
        pool.index_copy_(1, block_ids, part.transpose(0, 1))


def _parts(pools: Sequence[Tensor], lines: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each pool with its part of the lines as [num_lines, num_layers, ...]."""
    start = 0
    for pool in pools:
        shape = (len(lines), pool.shape[0], *pool.shape[2:])
        end = start + pool[:, 0].nbytes
        yield pool, lines[:, start:end].view(pool.dtype).view(shape)
        start += _part_bytes(pool)


def _part_bytes(pool: Tensor) -> int:
    return -(-pool[:, 0].numel() * pool.dtype.itemsize // 16) * 16
