"""Moves packed batches to the device.

Knows nothing of models or of how batches are made.
"""

import dataclasses

import torch
from numpy.typing import NDArray
from packing import PackedBatch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """A PackedBatch as tensors of the device."""

    tokens: Tensor  # int64 [num_tokens]
    targets: Tensor  # int64 [num_tokens]
    counted: Tensor  # bool [num_tokens]
    starts: Tensor  # int32 [max_documents + 1]
    cells: Tensor  # int64 [max_documents]


def to_device(batch: PackedBatch, device: torch.device) -> DeviceBatch:
    """Copies that the host does not wait for."""
    return DeviceBatch(
        tokens=_moved(batch.tokens, device).long(),
        targets=_moved(batch.targets, device).long(),
        counted=_moved(batch.counted, device),
        starts=_moved(batch.starts, device),
        cells=_moved(batch.cells, device).long(),
    )


def _moved(array: NDArray, device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
