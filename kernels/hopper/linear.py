"""Products of up to 192 rows with a weight streamed once from memory: TMA, wgmma, clusters.

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


class HopperLinear:
    """A weight laid out for the Hopper kernel, and its products with few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        """weight, bias: as the kernel reads them; `prepare` makes them from a model's."""
        self.weight, self.bias, self.gated = weight, bias, gated
        self._map = WeightMap(weight.data_ptr(), *weight.shape)

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
        out_size, in_size = self.weight.shape
        return self.run(x, choose_config(len(x), out_size, in_size, clusters_held()))

    def run(self, x: Tensor, config: HopperConfig) -> Tensor:
        """The product cut up as `config` says.

        It starts before the kernel ahead in the stream is done: weights are loaded, all else waits
        for it. That is sound if the kernel ahead, too, waits for its predecessor.

        Args:
            x: bfloat16 [num_rows, in_size], last axis contiguous, each row starting at 16 bytes; at
                most MAX_ROWS rows.

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
        width = out_size // 2 if self.gated else out_size
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if num_rows:
            self._launch(x, out, config)
        return out

    def _launch(self, x: Tensor, out: Tensor, config: HopperConfig) -> None:
        code = load().zl_linear(
            self._map.address,
            *self.weight.shape,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            None if self.bias is None else self.bias.data_ptr(),
            x.shape[0],
            self.gated,
            config.groups,
            config.splits,
            config.sharers,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        check(code)


def _interleave(stacked: Tensor) -> Tensor:
    """[gate; up] of 2 * size rows to groups of GATE_GROUP rows, gate and up in turn."""
    groups = stacked.view(2, -1, GATE_GROUP, *stacked.shape[1:])  # [2, num_groups, group, ...]
    return groups.transpose(0, 1).reshape(stacked.shape)
