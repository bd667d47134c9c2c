"""Matrix products whose every row has the same bits, however many rows there are: for the CPU.

The plain products (`linear.py`) run in numbers of rows that were found to agree for the weight's
shape. Knows nothing of layers, models or batches.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.kernels.reference.exact import silu
from zipage_lang.kernels.reference.linear import LinearProducts, PreparedLinear
from zipage_lang.kernels.reference.same_bits import agreeing_sizes, cancelling, in_sizes
from zipage_lang.kernels.reference.strict_ops import StrictStream

MIN_COMPARED = 256  # elements of a row, or of several, by which sizes are told apart
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, slots=True)
class StrictLinear:
    """A weight whose bias is added behind the product: inside, its place in the sum may differ."""

    product: PreparedLinear  # without the bias
    bias: Tensor | None  # [out_size]


class StrictProducts:
    """As `LinearProducts`, with sizes per shape, tried when a shape is first multiplied with.

    Not when it is prepared: the number of threads may still change until then.
    """

    def __init__(self) -> None:
        self._products = LinearProducts()
        # By in_size, out_size, dtype, whether it has a pack.
        self._sizes: dict[tuple[int, int, torch.dtype, bool], tuple[int, ...]] = {}

    def prepare(
        self, weight: Tensor, bias: Tensor | None = None, norm_weight: Tensor | None = None
    ) -> StrictLinear:
        """As `LinearProducts.prepare`."""
        return StrictLinear(self._products.prepare(weight, None, norm_weight), bias)

    def linear(self, x: Tensor, prepared: StrictLinear) -> Tensor:
        """x [num_rows, in_size] @ weight.T + bias, [num_rows, out_size]."""
        weight = prepared.product
        if len(x) == 0:
            return x.new_empty((0, weight.weight.shape[1]))
        sizes = self.sizes(weight)
        out = in_sizes(lambda rows: self._products.linear(rows, weight), [x], sizes)
        return out if prepared.bias is None else out + prepared.bias

    def normed_linear(self, stream: StrictStream, prepared: StrictLinear) -> Tensor:
        """norm(stream) @ weight.T + bias, [num_rows, out_size]."""
        return self.linear(stream.normed(prepared.product.norm_weight), prepared)

    def normed_gated_linear(self, stream: StrictStream, prepared: StrictLinear) -> Tensor:
        """silu(gate) * up of the normalised stream, [num_rows, out_size / 2]."""
        gate, up = self.normed_linear(stream, prepared).chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def add_linear(self, stream: StrictStream, x: Tensor, prepared: StrictLinear) -> None:
        """Add x [num_rows, in_size] @ weight.T + bias to the stream."""
        stream.add(self.linear(x, prepared))

    def sizes(self, prepared: PreparedLinear) -> tuple[int, ...]:
        """Numbers of rows that agree for weights of this one's shape."""
        in_size, out_size = prepared.weight.shape
        key = (in_size, out_size, prepared.weight.dtype, prepared.may_pack)
        if key not in self._sizes:
            self._sizes[key] = _try_sizes(prepared)
        return self._sizes[key]


def _try_sizes(prepared: PreparedLinear) -> tuple[int, ...]:
    """With a weight of the same shape and layout, which is given up again."""
    weight = prepared.weight
    num_probes = -(-MIN_COMPARED // weight.shape[1])
    rows, columns = cancelling(weight.new_empty((num_probes, weight.shape[0])), weight)
    stand_in = PreparedLinear(columns, None, prepared.may_pack)
    products = LinearProducts(max_pack_bytes=0)
    return agreeing_sizes(lambda x: products.linear(x, stand_in), [rows], ROW_COUNTS)
