"""The residual stream in plain torch: layers read it normalised and add to it.

Knows nothing of layers or of products.
"""

from typing import Self

from torch import Tensor

from zipage_lang.kernels.reference.fused_ops import rms_norm


class ResidualStream:
    """Values [num_rows, size] that each half of a layer reads normalised and then adds to."""

    def __init__(self, values: Tensor, eps: float) -> None:
        """eps: of every norm over the stream."""
        self.values, self.eps = values, eps

    def add(self, values: Tensor) -> None:
        """values: as the stream's, [num_rows, size]; what was there before stays as it is."""
        self.values = self.values + values

    def of_rows(self, index: Tensor) -> Self:
        """A stream of these rows alone. index: int64 [num_chosen]."""
        return type(self)(self.values.index_select(0, index), self.eps)

    def normed(self, weight: Tensor | None) -> Tensor:
        """values / rms(values) * weight, [num_rows, size]."""
        return rms_norm(self.values, weight, self.eps)
