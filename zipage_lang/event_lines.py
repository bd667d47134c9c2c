"""A stream's bytes as lines, by the line ends that server-sent events have: CR LF, LF or CR.

A text decoder's own idea of lines would not do: Unicode has further ends, such as U+2028, which may
stand inside of a JSON text. Knows nothing of connections or of what the lines say.
"""

import re

MAX_LINE_BYTES = 64 * 2**20

_END = re.compile(rb"\r\n|\n|\r")


class LineTooLongError(ValueError):
    """No line end came within MAX_LINE_BYTES."""


class EventLines:
    """One stream's."""

    def __init__(self) -> None:
        self._held: list[bytes] = []  # of a line whose end has not come yet
        self._held_len = 0
        self._after_cr = False  # a LF that comes first belongs to the line end before it

    def feed(self, piece: bytes) -> list[str]:
        """The lines that are whole now. Raises LineTooLongError."""
        if not piece:
            return []  # and what was last is still last
        if self._after_cr:
            piece = piece.removeprefix(b"\n")
        *ends, rest = _END.split(piece)
        self._after_cr = piece.endswith(b"\r")
        if ends:
            ends[0] = b"".join([*self._held, ends[0]])
            self._held, self._held_len = [], 0
        self._hold(rest)
        return [line.decode("utf-8", "replace") for line in ends]

    def _hold(self, rest: bytes) -> None:
        if rest:
            self._held.append(rest)
            self._held_len += len(rest)
        if self._held_len > MAX_LINE_BYTES:
            raise LineTooLongError(f"a line of the stream is longer than {MAX_LINE_BYTES} bytes")
