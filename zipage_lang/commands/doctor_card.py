"""What `zipage doctor` says of torch, the card, and the kernels that run on it.

Knows nothing of the rest of the machine or of how findings are printed.
"""

import glob
import subprocess
from collections.abc import Iterator
from typing import Any

from zipage_lang.commands.extras import version_of
from zipage_lang.commands.findings import Finding, bad, good, warn
from zipage_lang.commands.units import binary

LEAST_CAPABILITY = (8, 0)
GPU_EXTRA = "pip install 'zipage-lang[gpu]'"
PREBUILD = "python -m zipage_lang.runtime.prebuild"
HEAD_DIMS = (64, 128)  # of most models


def card_findings() -> Iterator[Finding]:
    """torch first; without a card no more than that is needed."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it does not load
        yield bad("torch", f"can't be imported: {error}", "pip install torch")
        return
    yield good("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield _no_card(torch)
        for name in ("triton", "flashinfer-python"):
            yield good(name, version_of(name) or "not installed; only a card needs it")
        return
    yield from _card(torch)
    yield _triton()
    yield from _flashinfer(torch)
    yield from _own_kernels(torch)


def _no_card(torch: Any) -> Finding:
    if not glob.glob("/dev/nvidia[0-9]*"):
        return good("card", "none: models run on the CPU, in float32")
    if torch.version.cuda is None:
        advice = "install a build of torch for CUDA; this one is for CPUs"
        return bad("card", "there is one, but torch can't use it", advice)
    advice = "update the driver (nvidia-smi shows it), or let this process see the card"
    return bad("card", f"torch for CUDA {torch.version.cuda} can't use it", advice)


def _card(torch: Any) -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        value = (
            f"{torch.cuda.get_device_name(index)}, compute {capability[0]}.{capability[1]}, "
            f"{binary(free)} free of {binary(total)}, CUDA {torch.version.cuda}"
        )
        if capability < LEAST_CAPABILITY:
            yield bad(f"card {index}", value, "bfloat16 kernels need compute 8.0; --backend cpu")
        elif free < 0.5 * total:
            yield warn(f"card {index}", value, "others hold much of its memory: see nvidia-smi")
        else:
            yield good(f"card {index}", value)


def _triton() -> Finding:
    version = version_of("triton")
    if version is None:
        return bad("triton", "not installed", GPU_EXTRA)
    return good("triton", version)


def _flashinfer(torch: Any) -> Iterator[Finding]:
    from zipage_lang.kernels.flashinfer_build import TESTED_VERSION
    from zipage_lang.kernels.flashinfer_module import GENERAL
    from zipage_lang.kernels.hopper.build import HOPPER
    from zipage_lang.kernels.setup_error import SetupError

    version = version_of("flashinfer-python")
    if version is None:
        yield bad("flashinfer", "not installed", GPU_EXTRA)
        return
    if not version.startswith(TESTED_VERSION):
        advice = f"pip install 'flashinfer-python=={TESTED_VERSION}.*'"
        yield bad("flashinfer", f"{version} is not supported", advice)
        return
    try:
        built = [size for size in HEAD_DIMS if GENERAL.is_built(torch.bfloat16, size)]
    except SetupError as error:
        yield bad("flashinfer", str(error), GPU_EXTRA)
        return
    yield good("flashinfer", version)
    yield from _attention(built)
    if torch.cuda.get_device_capability()[0] == HOPPER:
        yield from _prompts(torch, built)


def _attention(built: list[int]) -> Iterator[Finding]:
    """One line per size of heads; a model has one of them, and needs that one."""
    for size in HEAD_DIMS:
        name = f"attention {size}"
        if size in built:
            yield good(name, f"built, for heads of {size}")
        else:
            yield _not_built(name, f"{PREBUILD} --head-dim {size}", needed=not built)


def _prompts(torch: Any, sizes: list[int]) -> Iterator[Finding]:
    """One line per size of heads that can attend; without this one prompts only take longer."""
    from zipage_lang.kernels.prompt_module import FOR_HOPPER

    for size in sizes:
        name = f"prompts {size}"
        if FOR_HOPPER.is_built(torch.bfloat16, size):
            yield good(name, f"built, for long prompts with heads of {size}")
        else:
            yield _not_built(name, f"{PREBUILD} --head-dim {size}", needed=False)


def _own_kernels(torch: Any) -> Iterator[Finding]:
    from zipage_lang.kernels.hopper.build import HOPPER, find_library

    if torch.cuda.get_device_capability()[0] != HOPPER:
        yield good("own kernels", "for Hopper cards only; cuBLAS multiplies on this one")
        return
    library = find_library()
    if library is not None:
        yield good("own kernels", str(library))
    else:  # cuBLAS stands in for them
        yield _not_built("own kernels", PREBUILD, needed=False)


def _not_built(name: str, command: str, *, needed: bool) -> Finding:
    """The first start builds it, where there is a compiler."""
    from zipage_lang.kernels.hopper.build import KernelsUnavailableError, find_nvcc

    try:
        nvcc = find_nvcc()
    except KernelsUnavailableError:
        lacking = bad if needed else warn
        advice = "install the CUDA toolkit 12.5 or newer, or set CUDA_HOME"
        return lacking(name, "not built, and there is no nvcc", advice)
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = version.stdout.partition("release ")[2].partition(",")[0] or "unknown"
    advice = f"the first start builds it; to do so now: {command}"
    return warn(name, f"not built yet (nvcc {release} is here)", advice)
