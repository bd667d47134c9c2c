"""Host memory for swapped requests: whole blocks of every pool tensor, out and in.

Knows nothing of whose blocks they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.step_plan import BlockSwap


class HostSwap:
    """Bounded at construction; grows to its bound only when first used."""

    def __init__(self, cache: KVCache, num_host_blocks: int) -> None:
        self._pools = cache.block_pools
        self._num_blocks = num_host_blocks
        self._host: list[Tensor] = []

    def swap_out(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy pool blocks to host memory."""
        if not swaps:
            return
        block_ids, host_ids = _columns(swaps)
        for host, pool in zip(self._host_pools(), self._pools, strict=True):
            host[:, host_ids] = pool[:, block_ids.to(pool.device)].to(host.device)

    def swap_in(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy host memory back into pool blocks."""
        if not swaps:
            return
        block_ids, host_ids = _columns(swaps)
        for host, pool in zip(self._host_pools(), self._pools, strict=True):
            pool[:, block_ids.to(pool.device)] = host[:, host_ids].to(pool.device)

    def _host_pools(self) -> list[Tensor]:
        if not self._host:
            self._host = [
                torch.empty((pool.shape[0], self._num_blocks, *pool.shape[2:]), dtype=pool.dtype)
                for pool in self._pools
            ]
        return self._host


def _columns(swaps: Sequence[BlockSwap]) -> tuple[Tensor, Tensor]:
    block_ids = torch.tensor([swap.block_id for swap in swaps])  # [num_swaps]
    host_ids = torch.tensor([swap.host_id for swap in swaps])  # [num_swaps]
    return block_ids, host_ids
