"""Compiles grammars in processes of their own, each bounded in time and memory, and kept for more.

Knows nothing of requests, or of what is in a grammar.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

from zipage_lang.runtime import grammar_frames as frames
from zipage_lang.runtime.grammar import GrammarError, GrammarTooCostly
from zipage_lang.runtime.grammar_source import GrammarSource

MAX_WAIT_S = 60.0  # for one answer, on a busy machine: the worker's own bound is of CPU time
NO_WORKER = (
    "the process that compiles grammars ended as soon as it was started: the machine may be short "
    "of memory; try again later"
)


class GrammarPool:
    """As many workers as are asked at once. Safe to use from several threads."""

    def __init__(
        self,
        texts: Sequence[bytes],
        eos_token_ids: Sequence[int],
        bounds: frames.Bounds | None = None,
    ) -> None:
        """texts: what each token writes; nothing for special ones."""
        self._bounds = bounds or frames.Bounds()
        self._setup = frames.frame(frames.Setup(list(texts), list(eos_token_ids), self._bounds))
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def start_one(self) -> None:
        """Have a worker that gets ready while the caller does other things."""
        worker = _Worker(self._setup)
        with self._lock:
            self._idle.append(worker)

    def compile(self, source: GrammarSource) -> bytes:
        """The compiled grammar as xgrammar writes it. Raises GrammarError."""
        worker = self._asked(frames.frame(frames.Compile(source)))
        answer = worker.receive(time.monotonic() + MAX_WAIT_S)
        if answer is None:
            raise GrammarTooCostly(self._why(worker.ran_out_of_time()))
        if isinstance(answer, frames.Refused):
            if answer.is_spent:
                worker.kill()
                raise GrammarTooCostly(self._why(is_time=False))
            self._give_back(worker)
            kind = GrammarTooCostly if answer.is_costly else GrammarError
            raise kind(answer.error)
        self._give_back(worker)
        return answer.data

    def close(self) -> None:
        """End the idle workers."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

    def _why(self, is_time: bool) -> str:
        if is_time:
            return f"the grammar took over {self._bounds.max_compile_s} s to compile; simplify it"
        return (
            f"the grammar takes more than {self._bounds.max_memory_bytes >> 20} MiB to compile; "
            "make it simpler"
        )

    def _asked(self, message: bytes) -> "_Worker":
        """A worker that has the message: one that has ended since it was last asked is replaced.
        Raises GrammarError where a new one ends at once, as the next would too."""
        while (worker := self._take_idle()) is not None:
            if worker.send(message):
                return worker
            worker.kill()
        worker = _Worker(self._setup)
        if not worker.send(message):
            worker.kill()
            raise GrammarError(NO_WORKER)
        return worker

    def _take_idle(self) -> "_Worker | None":
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, worker: "_Worker") -> None:
        with self._lock:
            self._idle.append(worker)


class _Worker:
    """One process, from its start to its end. It ends by itself when its stdin is closed."""

    def __init__(self, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zipage_lang.runtime.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a grammar makes C++ say at its end is nobody's log
            env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _kill, self._process)
        self._has_run_out_of_time = False
        self.send(setup)

    def send(self, data: bytes) -> bool:
        """False when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def receive(self, deadline: float) -> frames.FromWorker | None:
        """The answer; None when the process has ended, or is ended here, without one."""
        head = self._read(frames.LENGTH_BYTES, deadline)
        data = None if head is None else self._read(int.from_bytes(head, "little"), deadline)
        return None if data is None else frames.decode_for_engine(data)

    def kill(self) -> None:
        self._end()

    def ran_out_of_time(self) -> bool:
        """Whether that is why it gave no answer; otherwise it was memory, whatever its last act."""
        if self._has_run_out_of_time:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its pipe closes a little before its exit code is there
        self.kill()
        return self._process.returncode == -signal.SIGXCPU

    def _read(self, num_bytes: int, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        pipe, parts = self._process.stdout.fileno(), []
        while num_bytes > 0:
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], wait_s)[0]:
                self._has_run_out_of_time = True
                self.kill()
                return None
            part = os.read(pipe, min(num_bytes, 2**20))
            if not part:
                return None
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
