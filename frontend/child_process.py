"""One child process: started, watched, its last words kept, killed with us.

Knows nothing of sockets, messages or what the child does.

Two small threads rather than asyncio's own watcher: they see the end and drain the pipe even while
the event loop is busy, so the child never blocks on a full pipe.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

TAIL_LINES = 20


# OpenMP threads that spin while they wait for each other lose their core to other processes just
# when they are needed: one busy neighbour then slows a step some 25 times.
WAIT_WITHOUT_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE"}


class ChildProcess:
    """Runs `command`; calls `on_exit` once, from a thread of its own, when the process has ended.

    What the child prints goes to our stderr; the last lines stay in `tail`.
    """

    def __init__(self, command: Sequence[str], on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        # A session of its own: Ctrl-C in the terminal is for the caller, not for the engine.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,  # never written: that it is closed tells the child of our end
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**WAIT_WITHOUT_SPINNING, **os.environ},
        )
        atexit.register(self.kill)
        self._reader = threading.Thread(target=self._read_lines, name="zipage-log", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="zipage-watch", daemon=True)
        self._reader.start()
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def tail(self) -> str:
        """The last lines the child printed."""
        return "".join(self._tail).strip()

    def kill(self) -> None:
        """End the process at once; does nothing where it has ended."""
        self._process.kill()

    def describe_end(self) -> str:
        """How it ended, with its last lines: "ended with exit code 1; its last lines: ..."."""
        code = self.returncode
        assert code is not None, f"process {self.pid} still runs"
        how = f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"
        last_lines = f"; its last lines:\n{self.tail}" if self.tail else ""
        return f"ended with {how}{last_lines}"

    def _read_lines(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with pipe:
            for raw_line in pipe:
                line = raw_line.decode(errors="replace")
                self._tail.append(line)
                _forward(line)

    def _watch(self) -> None:
        self._process.wait()
        self._reader.join(timeout=0.2)  # a grandchild may hold the pipe open: don't wait for it
        atexit.unregister(self.kill)
        self._on_exit()


def _forward(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (ValueError, OSError, AttributeError):
        return  # our own stderr is closed or gone; the line is still in the tail


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
