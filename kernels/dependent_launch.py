"""Programmatic dependent launch: a kernel's launch and first weights hidden behind its predecessor.

One rule keeps it safe: every kernel launched with it waits before it touches anything but constants
(weights), so that a kernel's completion implies that of all before it, in a stream and in a graph.
Knows nothing of what the kernels compute.
"""

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def release_successor(PDL: tl.constexpr):
    """Let the next kernel's programs start, as soon as all of this one's have and there is room."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Return once all kernels before this one are done and what they wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's constant PDL, and the launcher's own option."""
    if device.type != "cuda" or not _can_overlap(device.index):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def _can_overlap(device_index: int) -> bool:
    """Hopper and later; the interpreter has no such instructions."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device_index)[0] >= 9
