"""Matrix products of the cuda backend: our Hopper kernels for decode batches, cuBLAS for the rest.

Knows nothing of models or layers.
"""

import dataclasses
import logging

import torch
from torch import Tensor
from torch.nn.functional import linear

from zipage_lang.kernels import fused_ops
from zipage_lang.kernels.hopper.build import HOPPER, KernelsUnavailableError
from zipage_lang.kernels.hopper.choose import ROWS_NORMED_APART
from zipage_lang.kernels.hopper.library import load
from zipage_lang.kernels.hopper.linear import GATE_GROUP, HopperLinear
from zipage_lang.kernels.residual_stream import ResidualStream

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedProduct:
    """A weight as cuBLAS reads it, and as our kernel does where it takes the shape.

    Both read the same memory. A gated weight that our kernel takes has gate and up rows in turn,
    and one that reads a stream has the norm's weight in it.
    """

    weight: Tensor  # [out_size, in_size]
    bias: Tensor | None  # [out_size]
    hopper: HopperLinear | None
    norm_weight: Tensor | None  # [in_size] of the RMSNorm ahead, unless it is in the weight


class CardProducts:
    """Prepares weights and multiplies with them.

    Which kernel runs depends on the number of rows alone, so equal batches give equal bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._has_hopper = dtype == torch.bfloat16 and _can_load()

    def prepare(
        self, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None
    ) -> PreparedProduct:
        """Lay a weight out, once.

        Args:
            weight: [out_size, in_size] on the card.
            bias: [out_size] of the same dtype.
            norm_weight: [in_size] of the RMSNorm between a stream and this product.
        """
        return self._prepare(weight, bias, norm_weight, gated=False)

    def prepare_gated(
        self, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None
    ) -> PreparedProduct:
        """weight: [2 * size, in_size], the rows of gate, then those of up."""
        return self._prepare(weight, bias, norm_weight, gated=True)

    @staticmethod
    def linear(x: Tensor, prepared: PreparedProduct) -> Tensor:
        """x [num_rows, in_size] times the weight, [num_rows, out_size]."""
        hopper = _hopper_for(x, prepared)
        return linear(x, prepared.weight, prepared.bias) if hopper is None else hopper(x)

    @staticmethod
    def normed_linear(stream: ResidualStream, prepared: PreparedProduct) -> Tensor:
        """The normalised stream times the weight, [num_rows, out_size].

        One kernel, norm and all, if whoever added last to the stream left its squares.
        """
        out = _with_norm_inside(stream, prepared)
        if out is not None:
            return out
        return CardProducts.linear(stream.normed(prepared.norm_weight), prepared)

    @staticmethod
    def normed_gated_linear(stream: ResidualStream, prepared: PreparedProduct) -> Tensor:
        """silu(gate) * up of the normalised stream, [num_rows, out_size / 2]."""
        out = _with_norm_inside(stream, prepared)
        if out is not None:
            return out
        normed = stream.normed(prepared.norm_weight)  # [num_rows, in_size]
        hopper = _hopper_for(normed, prepared)
        if hopper is not None:
            return hopper(normed)
        gate_up = linear(normed, prepared.weight, prepared.bias)  # [num_rows, out_size]
        if prepared.hopper is not None:
            return fused_ops.silu_mul_interleaved(gate_up, GATE_GROUP)
        return fused_ops.silu_mul(gate_up)

    @staticmethod
    def add_linear(stream: ResidualStream, x: Tensor, prepared: PreparedProduct) -> None:
        """Add x [num_rows, in_size] times the weight to the stream."""
        hopper = _hopper_for(x, prepared)
        if hopper is not None and len(x) not in ROWS_NORMED_APART:
            stream.replace(*hopper.add(x, stream.values))
        else:
            stream.add(CardProducts.linear(x, prepared))

    def _prepare(
        self, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, *, gated: bool
    ) -> PreparedProduct:
        if not self._has_hopper or not HopperLinear.takes(weight):
            return PreparedProduct(weight.contiguous(), bias, None, norm_weight)
        hopper = HopperLinear.prepare(weight, bias, gated, norm_weight)
        return PreparedProduct(hopper.weight, hopper.bias, hopper, None)


def _hopper_for(x: Tensor, prepared: PreparedProduct) -> HopperLinear | None:
    if prepared.hopper is None or not prepared.hopper.takes_rows(x):
        return None
    return prepared.hopper


def _with_norm_inside(stream: ResidualStream, prepared: PreparedProduct) -> Tensor | None:
    if stream.squares is None:
        return None
    hopper = _hopper_for(stream.values, prepared)
    return None if hopper is None else hopper.normed(stream.values, stream.squares, stream.eps)


def _can_load() -> bool:
    """Whether this card has the kernels; builds them where nobody has yet."""
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return False
    try:
        load()
    except KernelsUnavailableError as error:
        _LOG.warning("decode products run on cuBLAS, some 8%% slower: %s", error)
        return False
    return True
