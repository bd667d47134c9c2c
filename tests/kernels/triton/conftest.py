"""Runs the Triton kernels under Triton's interpreter on a CPU, and with `-m gpu` on a card.

Knows nothing of any kernel.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before any import of one
