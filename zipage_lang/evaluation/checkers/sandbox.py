"""Runs a piece of Python that nobody has read, in a process of its own with limits.

What it holds to: wall time, CPU time, memory, the size of files and of the output, no core dumps,
an empty temporary folder as home, an empty environment, no inherited files; and, where the system
lets an ordinary user have a network namespace of its own, no network. Where it does not, `Run` says
so. What it does NOT protect from: reading whatever this user may read, writing wherever this user
may write, signals to this user's processes, many processes at once (until the wall time is over),
and holes in the kernel. Run code of a model that you do not trust in a container, or on a machine
that holds nothing of value.
Knows nothing of tests or answers.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
NETWORK_IS_OFF = "network off\n"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Of one run."""

    wall_s: float = 10.0
    cpu_s: int = 8
    memory_bytes: int = 1 * 2**30  # address space
    file_bytes: int = 16 * 2**20  # of each file, and of what it prints


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """How a run ended."""

    is_clean: bool  # exit code 0 within the limits
    output: str  # what it printed, errors apart
    error: str  # last line of what it said on stderr, or which limit it broke
    has_no_network: bool


def run_python(code: str, stdin: str, limits: SandboxLimits) -> Run:
    """Run `code` as a script. Never raises because of what the code does."""
    with tempfile.TemporaryDirectory(prefix="zipage-run-") as folder:
        home = Path(folder)
        (home / "program.py").write_text(code, encoding="utf-8", errors="replace")
        (home / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        return _run_in(home, limits)


def _run_in(home: Path, limits: SandboxLimits) -> Run:
    command = [sys.executable, "-I", "-S", str(CHILD), str(home), *map(str, _numbers(limits))]
    note = None
    with (
        (home / "stdin").open("rb") as source,
        (home / "stdout").open("wb") as out,
        (home / "stderr").open("wb") as err,
    ):
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=out,
            stderr=err,
            cwd=home,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            process.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            note = f"ran longer than {limits.wall_s:g} s"
        finally:
            _end_group(process)
    errors = _text_of(home / "stderr", limits)
    has_no_network = errors.startswith(NETWORK_IS_OFF)
    last_lines = errors.removeprefix(NETWORK_IS_OFF).strip().splitlines()
    if note is None and process.returncode < 0:
        note = f"was ended by {signal.Signals(-process.returncode).name}"
    error = note or (last_lines[-1][:300] if last_lines else "")
    is_clean = note is None and process.returncode == 0
    return Run(is_clean, _text_of(home / "stdout", limits), error, has_no_network)


def _numbers(limits: SandboxLimits) -> tuple[int, int, int]:
    return limits.cpu_s, limits.memory_bytes, limits.file_bytes


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """With everything that it started in its own session, and did not move out of it."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, and all that it started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text_of(path: Path, limits: SandboxLimits) -> str:
    with path.open("rb") as file:
        return file.read(limits.file_bytes).decode("utf-8", "replace")
