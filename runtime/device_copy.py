"""Small host values on their way to the device, without making the host wait.

A plain copy from pageable memory waits for all that was launched before; from pinned memory it
queues up behind it. The pinned memory comes from torch's caching allocator, which keeps a buffer
until its copy is done. Knows nothing of what the values mean.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send_array(values: np.ndarray, device: torch.device) -> Tensor:
    """A device tensor of the array's shape and dtype."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def send_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(values)] on the device."""
    return send_array(np.array(values, dtype=np.int64), device)
