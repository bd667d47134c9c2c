"""First code of the sandboxed process: takes on the limits, then becomes the program.

Started as a script by `sandbox.py`; imports nothing of this package. Knows nothing of tests.
"""

import ctypes
import os
import resource
import runpy
import sys

CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000


def take_limits(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """For this process and all that it starts; none can be raised again."""
    for name, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(name, (value, value))


def leave_network() -> bool:
    """A namespace without interfaces, where the system lets an ordinary user have one."""
    libc = ctypes.CDLL(None, use_errno=True)
    return any(libc.unshare(flags) == 0 for flags in (CLONE_NEWUSER | CLONE_NEWNET, CLONE_NEWNET))


def main(arguments: list[str]) -> None:
    """Take the limits, say whether the network is off, run `program.py` of the folder."""
    home, *limits = arguments
    if leave_network():
        os.write(2, b"network off\n")
    take_limits(*map(int, limits))
    sys.argv = ["program.py"]
    sys.path[:] = [home, *sys.path]
    runpy.run_path(os.path.join(home, "program.py"), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
