"""A server as a child process: started, waited for, asked what it holds, ended.

Knows nothing of loads, of clients or of what is measured.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
import psutil

START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0
POLL_S = 0.05
POOL_COUNTS = ("num_running", "num_waiting", "num_held")


def serve_command(model: str, **options: Any) -> list[str]:
    """`zipage serve MODEL` on a free port; `max_running=64` becomes `--max-running 64`."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [str(Path(sys.executable).with_name("zipage")), "serve", model, "--port=0", *flags]


class ServerProcess:
    """A server in a process of its own; `with` ends it. `url` is known once it listens.

    Parameters: `command` that starts it, and the API key it asks for, if any. Raises AssertionError
    with the log where it does not start.
    """

    def __init__(self, command: Sequence[str], *, api_key: str = "none") -> None:
        self.headers = {"authorization": f"Bearer {api_key}"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._log
        )
        self.url = ""

    def __enter__(self) -> "ServerProcess":
        try:
            self.url = self.wait_for_line(r"listening on (http://\S+);").group(1)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, by force where it does not listen."""
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    @property
    def log(self) -> str:
        """All that it has said."""
        number = self._log.fileno()  # its place in the file is also the child's: not to be moved
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    @property
    def process(self) -> psutil.Process:
        """The HTTP side."""
        return psutil.Process(self._process.pid)

    @property
    def engine(self) -> psutil.Process:
        """The engine's process: of the server's children the one that has worked the most."""
        children = self.process.children(recursive=True)
        return max(children, key=lambda child: sum(child.cpu_times()[:2]))

    def wait_ready(self) -> "ServerProcess":
        """Once the engine takes requests."""
        self.wait_for_line(r"ready: \S+ at http")
        return self

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """The first match in the log, as soon as there is one."""
        given_up_at = time.monotonic() + START_LIMIT_S
        while time.monotonic() < given_up_at:
            has_ended = self._process.poll() is not None
            found = re.search(pattern, self.log)
            if found:
                return found
            if has_ended:
                break
            time.sleep(POLL_S)
        raise AssertionError(f"no line {pattern!r} in:\n{self.log}")

    def info(self) -> dict[str, Any]:
        """/server_info: the engine's counts among them."""
        return self._ask("GET", "/server_info")

    def wait_idle(
        self, seconds: float = 30.0, *, counts: Sequence[str] = POOL_COUNTS
    ) -> dict[str, Any]:
        """/server_info once no request has a row, a place in the queue or a block.

        `counts` are those that must be zero. Raises AssertionError with them where that takes
        longer than `seconds`.
        """
        given_up_at = time.monotonic() + seconds
        while any((info := self.info())[name] for name in counts):
            left = {name: info[name] for name in counts}
            assert time.monotonic() < given_up_at, f"after {seconds} s still {left}"
            time.sleep(POLL_S)
        return info

    def flush_cache(self) -> dict[str, Any]:
        """Empty the prefix cache; the engine's counts after it."""
        return self._ask("POST", "/flush_cache")

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        response = httpx2.request(method, self.url + path, headers=self.headers, timeout=60)
        response.raise_for_status()
        answer: Mapping[str, Any] = response.json()
        return dict(answer)
