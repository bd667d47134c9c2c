"""Where an attention plan lives: device buffers, and two pinned host copies that take turns.

Knows nothing of attention, nor of what the numbers mean.
"""

import dataclasses

import torch
from torch import Tensor

TILE_BYTES = 16  # three int32 and a flag, in a plan of FlashInfer's general kernel
_TOKEN_BYTES = 8
_SPARE_BYTES = 16 * 1024
_SPARE_ENTRIES = 1024


@dataclasses.dataclass(slots=True)
class HostCopy:
    """Pinned memory that a plan is written into; free again once `sent` has happened."""

    workspace: Tensor  # uint8
    entries: Tensor  # int32
    sent: torch.cuda.Event


class PlanBuffers:
    """Buffers of one kind of launch. They grow when they must, which moves them."""

    workspace: Tensor  # uint8, device
    entries: Tensor  # int32, device

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts: list[HostCopy] = []
        self._turn = 0
        self.workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self.entries = torch.empty(0, dtype=torch.int32, device=device)

    def next_host(self, num_entries: int, num_tiles: int, num_tokens: int) -> HostCopy:
        """The host copy whose turn it is, with room for that much; waits until it was sent.

        With two copies the wait is for the step before last, so it costs nothing in practice.
        """
        num_bytes = workspace_bytes(num_tiles, num_tokens)
        if num_bytes > self.workspace.numel() or num_entries > self.entries.numel():
            self._grow(num_bytes, num_entries)
        self._turn = 1 - self._turn
        host = self._hosts[self._turn]
        host.sent.synchronize()
        return host

    def send(self, host: HostCopy, num_entries: int) -> None:
        """Copy the first entries to the device, on the current stream, and mark the copy's end."""
        self.entries[:num_entries].copy_(host.entries[:num_entries], non_blocking=True)
        host.sent.record()

    def _grow(self, num_bytes: int, num_entries: int) -> None:
        for host in self._hosts:
            host.sent.synchronize()
        num_bytes = max(2 * num_bytes, self.workspace.numel())
        num_entries = max(num_entries + num_entries // 2 + _SPARE_ENTRIES, self.entries.numel())
        # All or nothing: memory may be refused, and a plan goes by the size of one of them.
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        entries = torch.empty(num_entries, dtype=torch.int32, device=self._device)
        hosts = [_host_copy(num_bytes, num_entries) for _ in range(2)]
        self.workspace, self.entries, self._hosts = workspace, entries, hosts


def workspace_bytes(num_tiles: int, num_tokens: int) -> int:
    """Room for a plan of so many tiles, and for what its allocator rounds up."""
    return num_tiles * TILE_BYTES + num_tokens * _TOKEN_BYTES + _SPARE_BYTES


def _host_copy(num_bytes: int, num_entries: int) -> HostCopy:
    return HostCopy(
        workspace=torch.zeros(num_bytes, dtype=torch.uint8).pin_memory(),
        entries=torch.zeros(num_entries, dtype=torch.int32).pin_memory(),
        sent=torch.cuda.Event(),
    )
