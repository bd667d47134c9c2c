"""Matrix products of the cuda backend: our Hopper kernels for decode batches, cuBLAS for the rest.

Knows nothing of models or layers.
"""

import dataclasses
import logging

import torch
from torch import Tensor
from torch.nn.functional import linear

from zipage_lang.kernels import fused_ops
from zipage_lang.kernels.hopper.build import KernelsUnavailableError
from zipage_lang.kernels.hopper.choose import MAX_ROWS
from zipage_lang.kernels.hopper.library import load
from zipage_lang.kernels.hopper.linear import GATE_GROUP, HopperLinear

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedProduct:
    """A weight as cuBLAS reads it, and as our kernel does where it takes the shape.

    Both read the same memory. A gated weight that our kernel takes has gate and up rows in turn.
    """

    weight: Tensor  # [out_size, in_size]
    bias: Tensor | None  # [out_size]
    hopper: HopperLinear | None


class CardProducts:
    """Prepares weights and multiplies with them.

    Which kernel runs depends on the number of rows alone, so equal batches give equal bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._has_hopper = dtype == torch.bfloat16 and _can_load()

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedProduct:
        """weight: [out_size, in_size] on the card; bias: [out_size] of the same dtype."""
        hopper = self._hopper(weight, bias, gated=False)
        return PreparedProduct(weight.contiguous(), bias, hopper)

    def prepare_gated(self, weight: Tensor, bias: Tensor | None) -> PreparedProduct:
        """weight: [2 * size, in_size], the rows of gate, then those of up."""
        hopper = self._hopper(weight, bias, gated=True)
        if hopper is None:
            return PreparedProduct(weight.contiguous(), bias, None)
        return PreparedProduct(hopper.weight, hopper.bias, hopper)

    @staticmethod
    def linear(x: Tensor, prepared: PreparedProduct) -> Tensor:
        """x [num_rows, in_size] times the weight, [num_rows, out_size]."""
        hopper = _hopper_for(x, prepared)
        if hopper is not None:
            return hopper(x)
        return linear(x, prepared.weight, prepared.bias)

    @staticmethod
    def gated_linear(x: Tensor, prepared: PreparedProduct) -> Tensor:
        """silu(gate) * up, [num_rows, out_size / 2], in one kernel for a decode batch."""
        hopper = _hopper_for(x, prepared)
        if hopper is not None:
            return hopper(x)
        gate_up = linear(x, prepared.weight, prepared.bias)  # [num_rows, out_size]
        if prepared.hopper is not None:
            return fused_ops.silu_mul_interleaved(gate_up, GATE_GROUP)
        return fused_ops.silu_mul(gate_up)

    def _hopper(self, weight: Tensor, bias: Tensor | None, *, gated: bool) -> HopperLinear | None:
        if not self._has_hopper or not HopperLinear.takes(weight):
            return None
        return HopperLinear.prepare(weight, bias, gated)


def _hopper_for(x: Tensor, prepared: PreparedProduct) -> HopperLinear | None:
    """Our kernel for few rows, each of them starting at 16 bytes as the copy engine asks."""
    if prepared.hopper is None or len(x) > MAX_ROWS:
        return None
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1
    return prepared.hopper if is_aligned else None


def _can_load() -> bool:
    """Whether this card has the kernels; builds them where nobody has yet."""
    if torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        load()
    except KernelsUnavailableError as error:
        _LOG.warning("decode products run on cuBLAS, some 8%% slower: %s", error)
        return False
    return True
