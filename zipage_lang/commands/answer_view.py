"""Writes an answer to a terminal as it comes: thinking dimmed, a status line below while it lasts.

Knows nothing of engines or of who talks.
"""

import shutil
import sys
import time
from typing import TextIO

from rich.cells import cell_len

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CLEAR_BELOW = "\x1b[J"
MAKE_ROOM_BELOW = "\x1bD\x1b[A"  # scrolls where the cursor is on the last line, and stays in place
SAVE, RESTORE = "\x1b7", "\x1b8"
NEXT_LINE = "\x1b[B\r\x1b[K"
STATUS_EVERY_S = 0.1


class AnswerView:
    """One answer. Where the stream is no terminal, only the answer's text is written."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._is_thinking = False
        self._column = 0
        self._status_at = 0.0

    def think(self, text: str) -> None:
        """More of the thinking."""
        if self._is_terminal and text:
            self._is_thinking = True
            self._write(text)

    def answer(self, text: str) -> None:
        """More of the answer."""
        if self._is_thinking and text:
            text = text.lstrip("\n")
            if not text:
                return
            self._is_thinking = False
            self._write("\n\n" if self._column else "\n")
        self._write(text)

    def status(self, line: str) -> None:
        """Show a line below the text, at most ten times a second; the next text takes it away."""
        now = time.monotonic()
        width = shutil.get_terminal_size().columns
        # In a full last column terminals differ about where the cursor is.
        if not self._is_terminal or now - self._status_at < STATUS_EVERY_S or self._column >= width:
            return
        self._status_at = now
        shown = f"{DIM}{line[: width - 1]}{PLAIN}"
        self._emit(MAKE_ROOM_BELOW + SAVE + NEXT_LINE + shown + RESTORE)

    def end(self, line: str) -> None:
        """Close the answer; on a terminal the last status stays."""
        if self._is_terminal:
            self._emit(CLEAR_BELOW + PLAIN)
        self._emit("\n")
        if self._is_terminal:
            self._emit(f"{DIM}{line}{PLAIN}\n\n")

    def _write(self, text: str) -> None:
        if not text:
            return
        text = without_controls(text)
        if self._is_terminal:
            self._move(text)
            text = f"{CLEAR_BELOW}{DIM if self._is_thinking else ''}{text}{PLAIN}"
        self._emit(text)

    def _move(self, text: str) -> None:
        """Where the cursor will be, nearly: only a full last column matters."""
        width = shutil.get_terminal_size().columns
        _, newline, last = text.rpartition("\n")
        length = cell_len(last.expandtabs(8)) + (0 if newline else self._column)
        self._column = (length - 1) % width + 1 if length else 0

    def _emit(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def without_controls(text: str) -> str:
    """A model's text must not steer the terminal: control characters become a mark."""
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or not _is_control(c) else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character <= "\x9f"
