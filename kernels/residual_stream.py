"""The residual stream on a card: what was added last may still wait for the norm that reads it.

A product of ours adds while it stores and leaves sums of squares for the next norm. What cuBLAS
made is added by the launch that normalises. Knows nothing of layers or of products.
"""

from torch import Tensor

from zipage_lang.kernels import fused_ops


class ResidualStream:
    """Values [num_rows, size] that each half of a layer reads normalised and then adds to."""

    def __init__(self, values: Tensor, eps: float) -> None:
        """values: [num_rows, size], last axis contiguous. eps: of every norm over the stream."""
        self.eps = eps
        self._values = values
        self._waiting: Tensor | None = None  # to be added to the values
        self._squares: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """[num_rows, size] with all that was added."""
        if self._waiting is not None:
            self._values, self._waiting = self._values + self._waiting, None
        return self._values

    @property
    def squares(self) -> Tensor | None:
        """float32 [num_parts, num_rows], the squares of `values` summed over parts of a row, where
        whoever added last left them."""
        return self._squares

    def add(self, values: Tensor) -> None:
        """values: as the stream's."""
        self._values, self._waiting, self._squares = self.values, values, None

    def replace(self, values: Tensor, squares: Tensor) -> None:
        """Take a sum that was made elsewhere, with its squares."""
        self._values, self._waiting, self._squares = values, None, squares

    def of_rows(self, index: Tensor) -> "ResidualStream":
        """A stream of these rows alone. index: int64 [num_chosen]."""
        return ResidualStream(self.values.index_select(0, index), self.eps)

    def normed(self, weight: Tensor | None) -> Tensor:
        """values / rms(values) * weight in one launch; None multiplies by nothing."""
        if self._waiting is None:
            return fused_ops.rms_norm(self._values, weight, self.eps)
        normed, self._values = fused_ops.add_rms_norm(self._waiting, self._values, weight, self.eps)
        self._waiting = None
        return normed
