"""Appends events to a file from a thread of its own, so that a slow disk costs a run nothing.

Knows nothing of what the events mean.
"""

import atexit
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from io import FileIO
from pathlib import Path

from zipage_lang.trace_events import Event, Lost, encode_event

FLUSH_S = 0.2  # a line waits at most this long
MAX_BATCH_BYTES = 1 << 20
MAX_QUEUED = 200_000  # events; more are counted and dropped, so that memory stays bounded

log = logging.getLogger("zipage.trace")


class _Marker:
    """Done when all before it is in the file; the last one ends the thread."""

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.reached: Future[None] = Future()


class TraceWriter:
    """Takes events from any thread. Whole lines are appended at once, so writers may share a file.

    Raises OSError, with the file's name, when it can't be opened. After that nothing raises: a
    full disk or a file that was closed gives one logged warning, and the rest is dropped.
    """

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        self.path = Path(path)
        self._file: FileIO = self.path.open("ab", buffering=0)
        self._is_torn = _ends_inside_a_line(self.path)
        self._queue: queue.SimpleQueue[Event | _Marker] = queue.SimpleQueue()
        self._num_lost = 0
        self._has_warned = False
        self._closing: Future[None] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name="zipage-trace", daemon=True).start()
        atexit.register(self.close)

    def put(self, event: Event) -> None:
        """Queue one event; returns at once."""
        if self._closing is not None:
            self._warn("it was closed before the run ended")
        elif not self._has_warned and self._queue.qsize() < MAX_QUEUED:
            self._queue.put(event)
        else:
            self._num_lost += 1

    def flush(self) -> "Future[None]":
        """Done when all that was put before is in the file or given up."""
        if self._closing is not None:
            return self._closing
        marker = _Marker(is_last=False)
        self._queue.put(marker)
        return marker.reached

    def close_soon(self) -> "Future[None]":
        """Let the thread write the rest and close the file; done when it has."""
        with self._lock:
            if self._closing is None:
                marker = _Marker(is_last=True)
                self._closing = marker.reached
                self._queue.put(marker)
                atexit.unregister(self.close)
        return self._closing

    def close(self) -> None:
        """`close_soon`, waited for."""
        self.close_soon().result()

    def _work(self) -> None:
        """The thread: gather lines until a marker, enough bytes or the time says to write them."""
        while True:
            lines, marker = self._gather()
            self._write(lines)
            if marker is not None and marker.is_last:
                self._file.close()
            if marker is not None:
                marker.reached.set_result(None)
            if marker is not None and marker.is_last:
                return

    def _gather(self) -> tuple[list[bytes], _Marker | None]:
        item: Event | _Marker = self._queue.get()
        lines: list[bytes] = []
        num_bytes, deadline = 0, time.monotonic() + FLUSH_S
        while not isinstance(item, _Marker):
            lines.append(self._line(item))
            num_bytes += len(lines[-1])
            left = deadline - time.monotonic()
            if left <= 0 or num_bytes > MAX_BATCH_BYTES:
                return lines, None
            try:
                item = self._queue.get(timeout=left)
            except queue.Empty:
                return lines, None
        return lines, item

    def _line(self, event: Event) -> bytes:
        try:
            return encode_event(event) + b"\n"
        except (ValueError, TypeError, RecursionError, OverflowError):
            self._num_lost += 1
            return b""

    def _write(self, lines: list[bytes]) -> None:
        if self._num_lost and not self._has_warned:
            lines.append(encode_event(Lost(t=time.time(), count=self._num_lost)) + b"\n")
            self._num_lost = 0
        if lines and self._is_torn:
            lines.insert(0, b"\n")
            self._is_torn = False
        rest = memoryview(b"".join(lines))
        try:
            while rest and not self._has_warned:
                rest = rest[self._written(rest) :]
        except (OSError, ValueError) as error:  # ValueError: the file object was closed
            self._warn(str(error))

    def _written(self, rest: memoryview) -> int:
        """Bytes that went out; a file that takes none at all would be tried for ever."""
        num_written = self._file.write(rest)
        if not num_written:
            raise OSError("it takes no more bytes")
        return num_written

    def _warn(self, reason: str) -> None:
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            log.warning("trace file %s ends early: %s; the run goes on", self.path, reason)


def _ends_inside_a_line(path: Path) -> bool:
    """An earlier writer was cut short; what is appended must not share its last line."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
