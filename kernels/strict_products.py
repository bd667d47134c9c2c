"""Matrix products on a card whose every row has the same bits, however many rows there are.

One tile shape per weight, chosen by its sizes alone; see `strict_kernels.row_product_kernel`.
Knows nothing of models or layers.
"""

import dataclasses

import torch
import triton
from torch import Tensor

from zipage_lang.kernels import fused_ops
from zipage_lang.kernels.residual_stream import ResidualStream
from zipage_lang.kernels.strict_kernels import row_product_kernel

ROWS = 64  # of a tile: decode batches read each weight once, prefills fill the tensor cores
DEPTH_BYTES = 128  # of the shared axis that a step of the loop takes
_WIDE, _MIDDLE = 16_384, 8_192  # output sizes from which on tiles are wider
ALIGNMENT = 16  # bytes: what a kernel is compiled for must not change with where x lies


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRows:
    """A weight as the kernel reads it, which is as it comes."""

    weight: Tensor  # [out_size, in_size], contiguous
    bias: Tensor | None  # [out_size]
    norm_weight: Tensor | None  # [in_size] of the RMSNorm ahead


class StrictCardProducts:
    """The products that a backend has, by one kernel for any number of rows."""

    @staticmethod
    def prepare(
        weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None
    ) -> PreparedRows:
        """weight: [out_size, in_size]; norm_weight: of the norm between a stream and it."""
        return PreparedRows(weight.contiguous(), bias, norm_weight)

    @staticmethod
    def linear(x: Tensor, prepared: PreparedRows) -> Tensor:
        """x [num_rows, in_size] times the weight, [num_rows, out_size]."""
        return row_product(x, prepared.weight, prepared.bias)

    @staticmethod
    def normed_linear(stream: ResidualStream, prepared: PreparedRows) -> Tensor:
        """The normalised stream times the weight, [num_rows, out_size]."""
        return StrictCardProducts.linear(stream.normed(prepared.norm_weight), prepared)

    @staticmethod
    def normed_gated_linear(stream: ResidualStream, prepared: PreparedRows) -> Tensor:
        """silu(gate) * up of the normalised stream, [num_rows, out_size / 2]."""
        return fused_ops.silu_mul(StrictCardProducts.normed_linear(stream, prepared))

    @staticmethod
    def add_linear(stream: ResidualStream, x: Tensor, prepared: PreparedRows) -> None:
        """Add x [num_rows, in_size] times the weight to the stream."""
        stream.add(StrictCardProducts.linear(x, prepared))


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, summed in float32 and rounded once.

    Moves the weight once for every 64 rows; tiles of the same columns run side by side, so the
    later ones find it in the L2 cache.

    Args:
        x: [num_rows, in_size].
        weight: [out_size, in_size], contiguous, dtype of x.
        bias: [out_size], dtype of x, or None.

    Returns:
        [num_rows, out_size], dtype of x.
    """
    (num_rows, in_size), out_size = x.shape, weight.shape[0]
    assert weight.shape == (out_size, in_size), (weight.shape, x.shape)
    assert weight.is_contiguous(), weight.stride()
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x = x.contiguous()
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    columns = tile_columns(out_size)
    row_product_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(out_size, columns))](
        x,
        weight,
        bias,
        out,
        num_rows,
        IN_SIZE=in_size,
        OUT_SIZE=out_size,
        ROWS=ROWS,
        COLUMNS=columns,
        DEPTH=DEPTH_BYTES // x.element_size(),
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=3,
    )
    return out


def tile_columns(out_size: int) -> int:
    """Output columns of a tile: few where few are made, so that every multiprocessor has one."""
    if out_size >= _WIDE:
        return 128
    return 64 if out_size >= _MIDDLE else 32
