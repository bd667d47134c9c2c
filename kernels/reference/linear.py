"""Matrix products with fixed weights, laid out for the CPU: plain, and packed for a few rows.

Knows nothing of layers, models or batches.

A decode step of 2 to 32 rows is bound by how fast its weights are read and spread over registers.
MKL repacks a plain matrix in every such product; `_mkl_reorder_linear_weight` does it once. One
pack serves every number of rows: MKL asks only that the memory layout stays the same between
packing and computing (oneMKL reference, cblas_?gemm_pack). One row alone, or more rows than that,
are faster unpacked.

Which kernel runs depends on the number of rows, so a row's result may differ between batch sizes by
the rounding of its dtype, as it does in any BLAS; for one number of rows it is reproducible.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.kernels.reference.fused_ops import silu_mul
from zipage_lang.kernels.reference.residual_stream import ResidualStream

MAX_PACKED_ROWS = 32
MAX_PACK_BYTES = 2 * 2**30


@dataclasses.dataclass(slots=True)
class PreparedLinear:
    """One weight with its bias, as `LinearProducts.prepare` lays it out."""

    weight: Tensor  # [in_size, out_size], contiguous: one row or many rows run faster this way
    bias: Tensor | None  # [out_size]
    may_pack: bool  # its pack was counted against the byte limit
    norm_weight: Tensor | None = None  # [in_size] of the RMSNorm between a stream and the product
    pack: Tensor | None = None  # opaque copy of the weight, made when a few rows first meet it


class LinearProducts:
    """Prepares weights and multiplies with them; all its packs together stay under a byte limit.

    A pack costs as many bytes as its weight. Matrices are granted one in the order in which they
    are prepared, as long as they fit; the others keep to the plain product. Memory is taken on
    first use only, so an engine that never sees a small batch pays nothing.
    """

    def __init__(self, max_pack_bytes: int = MAX_PACK_BYTES) -> None:
        self._bytes_left = max_pack_bytes if _can_pack() else 0

    def prepare(
        self, weight: Tensor, bias: Tensor | None = None, norm_weight: Tensor | None = None
    ) -> PreparedLinear:
        """Lay out a weight for `linear`, once, at load time.

        Args:
            weight: [out_size, in_size], any strides; copied unless its transpose is contiguous.
            bias: [out_size] of the weight's dtype, or None.
            norm_weight: [in_size] of the RMSNorm ahead, for the products that read a stream.
        """
        may_pack = weight.dtype == torch.float32 and 0 < weight.nbytes <= self._bytes_left
        if may_pack:
            self._bytes_left -= weight.nbytes
        return PreparedLinear(weight.T.contiguous(), bias, may_pack, norm_weight)

    def linear(self, x: Tensor, prepared: PreparedLinear) -> Tensor:
        """x @ weight.T + bias.

        Args:
            x: [num_rows, in_size], of the weight's dtype.
            prepared: from `prepare`.

        Returns:
            [num_rows, out_size].
        """
        if prepared.may_pack and 2 <= len(x) <= MAX_PACKED_ROWS:
            return _packed_product(x, prepared)
        if prepared.bias is None:
            return torch.mm(x, prepared.weight)
        return torch.addmm(prepared.bias, x, prepared.weight)

    def normed_linear(self, stream: ResidualStream, prepared: PreparedLinear) -> Tensor:
        """norm(stream) @ weight.T + bias, where the weight was prepared with the norm's.

        Args:
            stream: values [num_rows, in_size], of the weight's dtype.

        Returns:
            [num_rows, out_size].
        """
        return self.linear(stream.normed(prepared.norm_weight), prepared)

    def normed_gated_linear(self, stream: ResidualStream, prepared: PreparedLinear) -> Tensor:
        """silu(gate) * up, where the weight's first half makes gate and the second up.

        Args:
            stream: values [num_rows, in_size], of the weight's dtype.
            prepared: from `prepare`, of a weight [2 * size, in_size].

        Returns:
            [num_rows, size].
        """
        return silu_mul(self.normed_linear(stream, prepared))

    def add_linear(self, stream: ResidualStream, x: Tensor, prepared: PreparedLinear) -> None:
        """Add x @ weight.T + bias to the stream.

        Args:
            stream: values [num_rows, out_size].
            x: [num_rows, in_size].
        """
        stream.add(self.linear(x, prepared))


def _can_pack() -> bool:
    """Whether this build of torch has MKL and its two packing operators."""
    operators = ("_mkl_reorder_linear_weight", "_mkl_linear")
    return torch.backends.mkl.is_available() and all(
        hasattr(torch.ops.mkl, operator) for operator in operators
    )


def _packed_product(x: Tensor, prepared: PreparedLinear) -> Tensor:
    by_output = prepared.weight.T  # [out_size, in_size]
    if prepared.pack is None:
        # Packed here rather than at load: MKL wants the thread count of the products to come.
        prepared.pack = torch.ops.mkl._mkl_reorder_linear_weight(by_output, MAX_PACKED_ROWS)
    # The last argument names the rows that are packed for; unless it is x's own, torch would
    # quietly fall back to the plain product.
    return torch.ops.mkl._mkl_linear(x, prepared.pack, by_output, prepared.bias, len(x))
