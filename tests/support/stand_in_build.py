"""Builds what runs a kernel's source on the CPU. Knows nothing of kernels."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = (
    "-std=c++17",
    "-O1",
    "-w",
    "-fno-gnu-unique",  # else two stand-ins in one process share what has one name
    "-fno-strict-aliasing",
    "-fPIC",
    "-I.",
)


def compiler() -> str:
    """Skips the test where there is none: the kernel itself runs on cards only."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ to build the kernel for the CPU with")
    return found


def build(folder: Path, *flags: str) -> ctypes.CDLL:
    """The library of `emulate.cpp` in the folder."""
    words = [compiler(), *FLAGS, *flags, "-shared"]
    command = [*words, "-x", "c++", "emulate.cpp", "-o", "emulated.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "emulated.so"))
