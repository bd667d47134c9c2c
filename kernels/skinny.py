"""Matrix products for decode batches: up to 256 rows times a weight that streams once from memory.

A grid of (weight tiles, splits of K) covers the card's SMs as evenly as it can; splits leave
float32 partial sums, which the next kernel adds up as it reads them, in the order of the splits.
Knows nothing of models or of batches beyond their rows.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zipage_lang.kernels.dependent_launch import launch_options
from zipage_lang.kernels.skinny_kernels import skinny_kernel, sum_partials_kernel

MAX_ROWS = 256
GATE_GROUP = 8  # rows of gate before as many of up in a gated weight; GROUP of the kernels
NUM_SMS = 132  # of the H100 and H200 that the rule below is made for
L2_OVER_MEMORY = 1.4  # how much faster an SM reads from L2 than its share of memory: 6 / 4.3 TB/s
SHARED_BYTES = 200 * 1024  # of an SM's 227 KiB; the rest holds barriers and the next kernel
MAX_TILE = 192 * 256  # accumulators of one program: 192 registers a thread at 8 warps
SUM_BLOCK = 1024


class SkinnyConfig(NamedTuple):
    """How one product is cut up; sizes in elements, powers of two."""

    block_n: int  # weight rows of a program
    tail_n: int  # and this many more, or 0: tiles of 192 rows
    block_k: int
    num_splits: int  # of K
    num_stages: int  # tiles in flight
    num_warps: int
    prefetch: int = 128  # columns of the first tile asked for before the predecessor is done
    tma: bool = True  # tiles by the copy engine, or by the threads' own asynchronous copies
    partial_dtype: torch.dtype = torch.float32  # of the sums that splits leave


class SkinnyLinear:
    """A weight laid out for `skinny_kernel`, and its products with few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        """weight, bias: as the kernel reads them; `prepare` makes them from a model's."""
        self.weight, self.bias, self.gated = weight, bias, gated
        self._tiles: dict[tuple[int, int], TensorDescriptor] = {}

    @classmethod
    def prepare(cls, weight: Tensor, bias: Tensor | None, gated: bool = False) -> "SkinnyLinear":
        """Lay a weight out.

        Args:
            weight: bfloat16 or float16 [out_size, in_size]; in_size a multiple of 8, out_size of 4
                (of 16 where gated).
            bias: [out_size] of the same dtype.
            gated: rows are [gate; up], and the product is silu(gate) * up. They are interleaved in
                groups of GATE_GROUP, a copy; `silu_mul_interleaved` reads other products of it.
        """
        out_size, in_size = weight.shape
        assert weight.dtype in (torch.bfloat16, torch.float16), weight.dtype
        assert in_size % 8 == 0, (weight.shape, "rows must start at 16 bytes")
        assert out_size % (2 * GATE_GROUP if gated else 4) == 0, weight.shape
        if gated:
            weight = _interleave(weight)
            bias = None if bias is None else _interleave(bias)
        return cls(weight.contiguous(), bias, gated)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_size], contiguous. Returns [num_rows, out_size], halved where gated."""
        return sum_partials(self.partials(x), x.dtype)

    def partials(self, x: Tensor) -> Tensor:
        """Returns [num_splits, num_rows, out_size], float32 where there is more than one split."""
        return self.run(x, choose_config(len(x), *self.weight.shape, self.gated))

    def run(self, x: Tensor, config: SkinnyConfig) -> Tensor:
        """`partials`, cut up as `config` says.

        Args:
            x: [num_rows, in_size], contiguous; at most MAX_ROWS rows.
        """
        (num_rows, in_size), out_size = x.shape, len(self.weight)
        assert in_size == self.weight.shape[1], (x.shape, self.weight.shape)
        assert num_rows <= MAX_ROWS, x.shape
        assert x.is_contiguous(), x.stride()
        assert x.dtype == self.weight.dtype, (x.dtype, self.weight.dtype)
        assert not (self.gated and config.num_splits > 1), "the gate needs the whole sum"
        dtype = config.partial_dtype if config.num_splits > 1 else x.dtype
        width = out_size // 2 if self.gated else out_size
        out = torch.empty((config.num_splits, num_rows, width), dtype=dtype, device=x.device)
        if num_rows == 0:
            return out
        rows, options = padded_rows(num_rows), launch_options(x.device)
        tile = config.block_n + config.tail_n
        skinny_kernel[(triton.cdiv(out_size, tile), config.num_splits)](
            self._weight_tiles(config.block_n, config),
            self._weight_tiles(config.tail_n, config),
            TensorDescriptor.from_tensor(x, [rows, config.block_k]) if config.tma else None,
            self.weight,
            x,
            self.bias,
            out,
            num_rows,
            N=out_size,
            K=in_size,
            BLOCK_N=config.block_n,
            TAIL_N=config.tail_n,
            BLOCK_K=config.block_k,
            ROWS=rows,
            SPLITS=config.num_splits,
            STAGES=config.num_stages,
            PREFETCH=config.prefetch if options["PDL"] else 0,
            HAS_BIAS=self.bias is not None,
            GATED=self.gated,
            TMA=config.tma,
            num_warps=config.num_warps,
            **options,
        )
        return out

    def _weight_tiles(self, block_n: int, config: SkinnyConfig) -> TensorDescriptor | None:
        if not config.tma or block_n == 0:
            return None
        key = block_n, config.block_k
        if key not in self._tiles:
            self._tiles[key] = TensorDescriptor.from_tensor(self.weight, list(key))
        return self._tiles[key]


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the splits, in their order.

    Args:
        partials: [num_splits, num_rows, size], contiguous.

    Returns:
        [num_rows, size] of dtype: a view where there is one split of that dtype.
    """
    if len(partials) == 1 and partials.dtype == dtype:
        return partials[0]
    out = torch.empty(partials.shape[1:], dtype=dtype, device=partials.device)
    if out.numel():
        sum_partials_kernel[(triton.cdiv(out.numel(), SUM_BLOCK),)](
            partials,
            out,
            out.numel(),
            SPLITS=len(partials),
            BLOCK=SUM_BLOCK,
            num_warps=4,
            **launch_options(partials.device),
        )
    return out


def padded_rows(num_rows: int) -> int:
    """The kernel's width for so many rows: 16 to MAX_ROWS, a power of two."""
    return max(16, triton.next_power_of_2(num_rows))


@functools.cache
def choose_config(num_rows: int, out_size: int, in_size: int, gated: bool = False) -> SkinnyConfig:
    """The cut whose busiest SM reads least, of the tiles and splits that fit."""
    rows = padded_rows(num_rows)
    block_k = 128 if rows <= 64 else 64
    num_steps = triton.cdiv(in_size, block_k)
    max_splits = 1 if gated else min(8, num_steps)
    cuts = [
        (tile, num_splits)
        for tile in (64, 128, 192, 256)
        for num_splits in range(1, max_splits + 1)
        if tile * rows <= MAX_TILE
    ]
    tile, num_splits = min(
        cuts, key=lambda cut: _bytes_per_sm(cut[0], cut[1], rows, out_size, in_size)
    )
    stage_bytes = (tile + rows) * block_k * 2
    return SkinnyConfig(
        block_n=128 if tile == 192 else tile,
        tail_n=64 if tile == 192 else 0,
        block_k=block_k,
        num_splits=num_splits,
        num_stages=max(2, min(6, SHARED_BYTES // stage_bytes, num_steps // num_splits + 1)),
        num_warps=4 if tile * rows <= 128 * 64 else 8,
        prefetch=128,
    )


def _bytes_per_sm(tile: int, num_splits: int, rows: int, out_size: int, in_size: int) -> float:
    """What the busiest SM moves, in bytes from L2; memory's share weighs L2_OVER_MEMORY."""
    waves = triton.cdiv(triton.cdiv(out_size, tile) * num_splits, NUM_SMS)
    streamed = waves * (tile + rows) * triton.cdiv(in_size, num_splits) * 2
    from_memory = out_size * in_size * 2 / NUM_SMS * L2_OVER_MEMORY
    # the next kernel reads the partial sums that this one writes
    written = waves * tile * rows * 4 if num_splits > 1 else 0
    read = num_splits * out_size * rows * 4 / NUM_SMS if num_splits > 1 else 0
    return max(streamed, from_memory) + written + read


def _interleave(stacked: Tensor) -> Tensor:
    """[gate; up] of 2 * size rows to groups of GATE_GROUP rows, gate and up in turn."""
    groups = stacked.view(2, -1, GATE_GROUP, *stacked.shape[1:])  # [2, num_groups, group, ...]
    return groups.transpose(0, 1).reshape(stacked.shape)
