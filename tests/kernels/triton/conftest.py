"""Runs the Triton kernels under Triton's interpreter on a CPU, and with `-m gpu` on a card.

Knows nothing of any kernel.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before any import of one


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="kernels are compiled for the card here"
            ),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)
