"""Products of up to 256 rows with a weight streamed once from memory: TMA, wgmma, clusters.

Knows nothing of models or of batches beyond their rows.
"""

import torch
from torch import Tensor

from zipage_lang.kernels.hopper.choose import (
    BLOCK_K,
    GROUP_ROWS,
    HopperConfig,
    beats_cublas,
    choose_config,
)
from zipage_lang.kernels.hopper.library import check, clusters_held, load, weight_map

GATE_GROUP = 8  # rows of gate before as many of up in a gated weight


class HopperLinear:
    """A weight laid out for the Hopper kernel, and its products with few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        """weight, bias: as the kernel reads them; `prepare` makes them from a model's."""
        self.weight, self.bias, self.gated = weight, bias, gated
        self._map = weight_map(weight.data_ptr(), *weight.shape)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the kernel is made for weights of this dtype and shape."""
        is_whole = weight.shape[0] % GROUP_ROWS == 0 and weight.shape[1] % BLOCK_K == 0
        return weight.dtype == torch.bfloat16 and is_whole

    @classmethod
    def prepare(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        gated: bool = False,
        norm_weight: Tensor | None = None,
    ) -> "HopperLinear":
        """Lay a weight out.

        Args:
            weight: bfloat16 [out_size, in_size] on the card, both multiples of 64.
            bias: bfloat16 [out_size].
            gated: rows are [gate; up], and the product is silu(gate) * up. They are interleaved in
                groups of GATE_GROUP, a copy; `silu_mul_interleaved` reads other products of it.
            norm_weight: bfloat16 [in_size] of the RMSNorm ahead, which goes into a copy of the
                weight: what is multiplied is then x / rms(x).

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
        if norm_weight is not None:  # rounded once: two bfloat16 make an exact float32
            weight = weight.mul_(norm_weight) if gated else weight * norm_weight
        return cls(weight.contiguous(), bias, gated)

    def takes_rows(self, x: Tensor) -> bool:
        """Whether this kernel beats cuBLAS for as many rows, and its copy engine can read them.

        It asks that each row starts at 16 bytes.
        """
        is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1
        return is_aligned and beats_cublas(len(x), *self.weight.shape)

    def __call__(self, x: Tensor, config: HopperConfig | None = None) -> Tensor:
        """The product.

        It starts before the kernel ahead in the stream is done: weights are loaded, all else waits
        for it. That is sound if the kernel ahead, too, waits for its predecessor.

        Args:
            x: bfloat16 [num_rows, in_size], last axis contiguous, each row starting at 16 bytes; at
                most MAX_ROWS rows.
            config: how it is cut up, here and below; chosen if None.

        Returns:
            [num_rows, out_size], halved where gated.

        Raises:
            ValueError: more than MAX_ROWS rows.
            RuntimeError: no kernel is built for the config.
        """
        out = self._new(x, self.width)
        self._launch(x, out, config)
        return out

    def normed(
        self, x: Tensor, squares: Tensor, eps: float, config: HopperConfig | None = None
    ) -> Tensor:
        """The product of x / rms(x); the norm's weight is in ours since `prepare`.

        Args:
            squares: float32 [num_parts, num_rows], the squares of x summed over parts of a row, as
                `add` leaves them.
            eps: added to the mean square.
        """
        assert squares.dtype == torch.float32, squares.dtype
        assert squares.shape[1:] == x.shape[:1], (squares.shape, x.shape)
        assert squares.is_contiguous(), squares.stride()
        out = self._new(x, self.width)
        self._launch(x, out, config, in_squares=squares, eps=eps)
        return out

    def add(
        self, x: Tensor, residual: Tensor, config: HopperConfig | None = None
    ) -> tuple[Tensor, Tensor]:
        """residual + product, and what the next norm needs of it.

        Args:
            residual: bfloat16 [num_rows, out_size], last axis contiguous, rows start at 8 bytes.

        Returns:
            total: [num_rows, out_size], rounded once.
            squares: float32 [num_tiles, num_rows], the squares of `total` summed over the columns
                of each tile.
        """
        assert not self.gated, "a gated product is added to nothing"
        assert residual.shape == (len(x), self.width), (residual.shape, x.shape, self.width)
        assert residual.dtype == x.dtype, (residual.dtype, x.dtype)
        assert residual.stride(1) == 1, residual.stride()
        assert residual.stride(0) % 4 == 0, residual.stride()
        assert residual.data_ptr() % 8 == 0, residual.data_ptr()
        config = config or self._chosen(x, adds=True)
        num_tiles = -(-self.width // (config.groups * GROUP_ROWS))
        total = self._new(x, self.width)
        squares = torch.empty((num_tiles, len(x)), dtype=torch.float32, device=x.device)
        self._launch(x, total, config, residual=residual, out_squares=squares)
        return total, squares

    @property
    def width(self) -> int:
        """Columns of a product."""
        return len(self.weight) // 2 if self.gated else len(self.weight)

    def _chosen(self, x: Tensor, *, adds: bool = False) -> HopperConfig:
        return choose_config(len(x), *self.weight.shape, clusters_held(), adds=adds)

    def _new(self, x: Tensor, width: int) -> Tensor:
        return torch.empty((len(x), width), dtype=x.dtype, device=x.device)

    def _launch(
        self,
        x: Tensor,
        out: Tensor,
        config: HopperConfig | None,
        *,
        residual: Tensor | None = None,
        out_squares: Tensor | None = None,
        in_squares: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        assert x.shape[1] == self.weight.shape[1], (x.shape, self.weight.shape)
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.stride(1) == 1, x.stride()
        assert x.stride(0) % 8 == 0, x.stride()
        assert x.data_ptr() % 16 == 0, x.data_ptr()
        config = config or self._chosen(x)
        if len(x) == 0:
            return
        code = load().zl_linear(
            self._map.address,
            *self.weight.shape,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            _address(self.bias),
            _address(residual),
            0 if residual is None else residual.stride(0),
            _address(out_squares),
            _address(in_squares),
            0 if in_squares is None else len(in_squares),
            eps,
            x.shape[0],
            self.gated,
            config.groups,
            config.splits,
            config.sharers,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        check(code)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _interleave(stacked: Tensor) -> Tensor:
    """[gate; up] of 2 * size rows to groups of GATE_GROUP rows, gate and up in turn."""
    groups = stacked.view(2, -1, GATE_GROUP, *stacked.shape[1:])  # [2, num_groups, group, ...]
    return groups.transpose(0, 1).reshape(stacked.shape)
