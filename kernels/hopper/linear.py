"""Products of up to 256 rows with a weight streamed once from memory: TMA, wgmma, clusters.

Knows nothing of models or of batches beyond their rows.
"""

import torch
from torch import Tensor

from zipage_lang.kernels.hopper.choose import (
    BLOCK_K,
    GROUP_ROWS,
    MAX_ROWS,
    HopperConfig,
    choose_config,
)
from zipage_lang.kernels.hopper.library import WeightMap, check, clusters_held, load

GATE_GROUP = 8  # rows of gate before as many of up in a gated weight
PROMOTIONS = (0, 64, 128, 256)  # bytes that a miss in L2 fetches at least


class HopperLinear:
    """A weight laid out for the Hopper kernel, and its products with few rows."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, gated: bool, promotion: int = 256
    ) -> None:
        """weight, bias: as the kernel reads them; `prepare` makes them from a model's."""
        self.weight, self.bias, self.gated = weight, bias, gated
        out_size, in_size = weight.shape
        self._map = WeightMap(weight.data_ptr(), out_size, in_size, PROMOTIONS.index(promotion))

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the kernel is made for weights of this dtype and shape."""
        is_whole = weight.shape[0] % GROUP_ROWS == 0 and weight.shape[1] % BLOCK_K == 0
        return weight.dtype == torch.bfloat16 and is_whole

    @classmethod
    def prepare(cls, weight: Tensor, bias: Tensor | None, gated: bool = False) -> "HopperLinear":
        """Lay a weight out.

        Args:
            weight: bfloat16 [out_size, in_size] on the card, both multiples of 64.
            bias: bfloat16 [out_size].
            gated: rows are [gate; up], and the product is silu(gate) * up. They are interleaved in
                groups of GATE_GROUP, a copy; `silu_mul_interleaved` reads other products of it.

        Raises:
            ValueError: shapes or dtypes that the kernel has not been made for.
            KernelsUnavailableError: no Hopper card, or no library and no nvcc to build it.
        """
        if not cls.takes(weight):
            raise ValueError(
                f"weight is {weight.dtype} {list(weight.shape)}; the Hopper kernel takes bfloat16"
                f" with sides that are multiples of {GROUP_ROWS}"
            )
        if gated:
            weight = _interleave(weight)
            bias = None if bias is None else _interleave(bias)
        return cls(weight.contiguous(), bias, gated)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_size]. Returns [num_rows, out_size], halved where gated.

        Raises ValueError for more than MAX_ROWS rows.
        """
        return self.run(x, self.config(len(x)))

    def config(self, num_rows: int, *, apart: bool = False) -> HopperConfig:
        """How a product with this many rows is cut up."""
        out_size, in_size = self.weight.shape
        return choose_config(num_rows, out_size, in_size, apart=apart, held=clusters_held())

    def partials(self, x: Tensor) -> Tensor:
        """The product as float32 [num_splits, num_rows, out_size] for the next kernel to sum.

        With one split it is the bfloat16 product, [1, num_rows, out_size]. Not for gated weights.
        """
        assert not self.gated, "the gate needs the whole sum"
        config = self.config(len(x), apart=True)
        return self.run(x, config) if config.apart else self.run(x, config)[None]

    def run(self, x: Tensor, config: HopperConfig, *, overlap: bool = True) -> Tensor:
        """The product cut up as `config` says; as `partials` where config.apart.

        Args:
            x: bfloat16 [num_rows, in_size], last axis contiguous; 1 to MAX_ROWS rows.
            overlap: start before the kernel ahead in the stream is done (weights are loaded; all
                else waits for it). Sound if that kernel, too, waits for its predecessor.

        Raises RuntimeError where no kernel is built for the config.
        """
        num_rows, in_size = x.shape
        out_size = len(self.weight)
        assert in_size == self.weight.shape[1], (x.shape, self.weight.shape)
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.stride(1) == 1, x.stride()
        assert x.stride(0) % 8 == 0, x.stride()
        assert x.data_ptr() % 16 == 0, x.data_ptr()
        assert num_rows <= MAX_ROWS, (num_rows, MAX_ROWS)
        if config.apart:
            shape = (config.splits, num_rows, out_size)
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
        else:
            width = out_size // 2 if self.gated else out_size
            out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if num_rows:
            self._launch(x, out, config, overlap)
        return out

    def _launch(self, x: Tensor, out: Tensor, config: HopperConfig, overlap: bool) -> None:
        address = out.data_ptr()
        code = load().zl_linear(
            self._map.address,
            *self.weight.shape,
            x.data_ptr(),
            x.stride(0),
            None if config.apart else address,
            out.shape[-1],
            address if config.apart else None,
            None if self.bias is None else self.bias.data_ptr(),
            x.shape[0],
            self.gated,
            config.groups,
            config.splits,
            config.sharers,
            config.stages,
            config.shared_bytes,
            config.prefetch,
            overlap,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        check(code)


def _interleave(stacked: Tensor) -> Tensor:
    """[gate; up] of 2 * size rows to groups of GATE_GROUP rows, gate and up in turn."""
    groups = stacked.view(2, -1, GATE_GROUP, *stacked.shape[1:])  # [2, num_groups, group, ...]
    return groups.transpose(0, 1).reshape(stacked.shape)
