"""Compares expressions in a process of its own, so that none can hang or fill the harness.

Knows nothing of LaTeX; what it starts is `math_worker.py`.
"""

import json
import selectors
import subprocess
import sys
import threading
import weakref

TIME_LIMIT_S = 5.0  # for one pair of answers
START_LIMIT_S = 60.0  # importing sympy takes seconds on a busy machine
COMMAND = (sys.executable, "-P", "-m", "zipage_lang.evaluation.checkers.math_worker")


class MathProcess:
    """Started at the first question; replaced after one that took too long. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._ending: weakref.finalize[..., MathProcess] | None = None
        self.num_timeouts = 0

    def are_equal(self, left: str, right: str) -> bool:
        """False too where one can't be read, or where telling takes too long."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            process.stdin.write(json.dumps([left, right]) + "\n")
            process.stdin.flush()
            reply = self._read_line(process, TIME_LIMIT_S)
            if reply is None:
                self.num_timeouts += 1
                self._end()
            return reply == "true"

    def close(self) -> None:
        """End the process. Also happens when this object goes."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            self._ending = weakref.finalize(self, _end_process, self._process)
            if self._read_line(self._process, START_LIMIT_S) != "ready":
                self._end()
                raise RuntimeError("the process that compares expressions did not start")
        return self._process

    def _read_line(self, process: subprocess.Popen[str], limit_s: float) -> str | None:
        """None after `limit_s`, or where the process has ended. One line is sent per question."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return process.stdout.readline().strip() or None

    def _end(self) -> None:
        self._process = None
        if self._ending is not None:
            self._ending()


def _end_process(process: subprocess.Popen[str]) -> None:
    """It would end with its input, but one that is busy has to be killed."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
