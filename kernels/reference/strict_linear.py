"""Matrix products whose every row has the same bits, however many rows there are: for the CPU.

The plain products (`linear.py`) run in numbers of rows that were found to agree for the weight's
shape. Knows nothing of layers, models or batches.
"""

import torch
from torch import Tensor

from zipage_lang.kernels.reference.exact import silu
from zipage_lang.kernels.reference.linear import LinearProducts, PreparedLinear
from zipage_lang.kernels.reference.same_bits import agreeing_sizes, cancelling, in_sizes
from zipage_lang.kernels.reference.strict_ops import StrictStream

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class StrictProducts:
    """As `LinearProducts`, with sizes per shape, tried when a shape is first multiplied with.

    Not when it is prepared: the number of threads may still change until then.
    """

    def __init__(self) -> None:
        self._products = LinearProducts()
        # By in_size, out_size, dtype, whether it has a pack, and a bias.
        self._sizes: dict[tuple[int, int, torch.dtype, bool, bool], tuple[int, ...]] = {}

    def prepare(
        self, weight: Tensor, bias: Tensor | None = None, norm_weight: Tensor | None = None
    ) -> PreparedLinear:
        """As `LinearProducts.prepare`."""
        return self._products.prepare(weight, bias, norm_weight)

    def linear(self, x: Tensor, prepared: PreparedLinear) -> Tensor:
        """x [num_rows, in_size] @ weight.T + bias, [num_rows, out_size]."""
        if len(x) == 0:
            return x.new_empty((0, prepared.weight.shape[1]))
        return in_sizes(
            lambda rows: self._products.linear(rows, prepared), [x], self.sizes(prepared)
        )

    def normed_linear(self, stream: StrictStream, prepared: PreparedLinear) -> Tensor:
        """norm(stream) @ weight.T + bias, [num_rows, out_size]."""
        return self.linear(stream.normed(prepared.norm_weight), prepared)

    def normed_gated_linear(self, stream: StrictStream, prepared: PreparedLinear) -> Tensor:
        """silu(gate) * up of the normalised stream, [num_rows, out_size / 2]."""
        gate, up = self.normed_linear(stream, prepared).chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def add_linear(self, stream: StrictStream, x: Tensor, prepared: PreparedLinear) -> None:
        """Add x [num_rows, in_size] @ weight.T + bias to the stream."""
        stream.add(self.linear(x, prepared))

    def sizes(self, prepared: PreparedLinear) -> tuple[int, ...]:
        """Numbers of rows that agree for weights of this one's shape."""
        in_size, out_size = prepared.weight.shape
        dtype, has_bias = prepared.weight.dtype, prepared.bias is not None
        key = (in_size, out_size, dtype, prepared.may_pack, has_bias)
        if key not in self._sizes:
            self._sizes[key] = _try_sizes(prepared)
        return self._sizes[key]


def _try_sizes(prepared: PreparedLinear) -> tuple[int, ...]:
    """With a weight of the same shape and layout, which is given up again."""
    weight = prepared.weight
    row, columns = cancelling(weight.new_empty((1, weight.shape[0])), weight)
    bias = None if prepared.bias is None else torch.zeros_like(prepared.bias)
    stand_in = PreparedLinear(columns, bias, prepared.may_pack)
    products = LinearProducts(max_pack_bytes=0)
    return agreeing_sizes(lambda x: products.linear(x, stand_in), [row], ROW_COUNTS)
