"""Finds or builds the shared library of the Hopper kernels, named by what it was built from.

Knows nothing of tensors or of what the library does.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from zipage_lang.kernels.build_progress import shown_build
from zipage_lang.kernels.setup_error import SetupError

HOPPER = 9  # major compute capability
FOLDER = Path(__file__).resolve().parent
NVCC_FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-cudart=static",
    "--split-compile=0",
    "-Xcompiler=-fPIC",
    "-shared",
)
BUILD_TIMEOUT_S = 900


class KernelsUnavailableError(SetupError):
    """There is no library for this source and none can be built here; the message says why."""


def library_path() -> Path:
    """The library built from the source beside this file, built now if nobody did before.

    Looked for in the folder ZIPAGE_KERNELS, in `prebuilt/` beside this file, then in the cache
    folder (XDG_CACHE_HOME or ~/.cache), where a new one goes; it is built with progress shown.

    Raises KernelsUnavailableError.
    """
    return find_library() or build(cache_folder() / library_name())


def find_library() -> Path | None:
    """The library, where it is built already."""
    name = library_name()
    for folder in (_named_folder(), FOLDER / "prebuilt", cache_folder()):
        if folder is not None and (folder / name).is_file():
            return folder / name
    return None


def library_name() -> str:
    """Changes with the source and the flags, so a stale library is never loaded."""
    digest = hashlib.sha256(" ".join(NVCC_FLAGS).encode())
    for source in sorted(FOLDER.glob("*.cu*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"zipage_hopper_{digest.hexdigest()[:12]}.so"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zipage" / "kernels"


def build(target: Path) -> Path:
    """Compile into `target`, which appears whole or not at all; shows progress. Needs no card.

    Raises KernelsUnavailableError without nvcc, or with its output where it fails.
    """
    nvcc = find_nvcc()
    target.parent.mkdir(parents=True, exist_ok=True)
    note = f"about half a minute, once; kept in {target.parent}"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        with shown_build("our Hopper kernels", note, made.parent, num_files=1):
            sources = [str(source) for source in sorted(FOLDER.glob("*.cu"))]
            _compile([nvcc, *NVCC_FLAGS, "-o", str(made), *sources])
        made.replace(target)
    return target


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailableError(
            f"{command[0]} took over {BUILD_TIMEOUT_S} s for {FOLDER}"
        ) from error
    if done.returncode != 0:
        raise KernelsUnavailableError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def _named_folder() -> Path | None:
    named = os.environ.get("ZIPAGE_KERNELS")
    return Path(named) if named else None


def find_nvcc() -> str:
    """The CUDA compiler. Raises KernelsUnavailableError that says what to install."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    beside = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    for candidate in ("nvcc", *beside):
        found = shutil.which(candidate)
        if found:
            return found
    raise KernelsUnavailableError(
        f"the Hopper kernels are not built ({library_name()} is in no folder) and there is no nvcc:"
        " install the CUDA toolkit 12.5 or newer, set CUDA_HOME, or set ZIPAGE_KERNELS to a folder"
        " with the library"
    )
