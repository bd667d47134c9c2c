"""Random tensors that are the same on every machine: drawn on the CPU, then moved.

Knows nothing of what is tested with them.
"""

import torch
from torch import Tensor


def random_tensor(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    spread: float = 1.0,
) -> Tensor:
    """Normally distributed with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype).to(device)
