"""Tool calls told apart from the text around them, while both stream in.

However a text is cut into pieces, the same calls and the same text come out.
Knows nothing of templates, grammars, tokens or of how replies are written.
"""

from collections.abc import Collection
from typing import Protocol

from zipage_lang.server.openai.call_reader import CallPiece, CallReader
from zipage_lang.server.openai.json_scan import WHITESPACE

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


Piece = str | CallPiece


class ToolParser(Protocol):
    """One answer's."""

    num_calls: int

    def feed(self, text: str) -> list[Piece]:
        """What more of the answer brings."""
        ...

    def finish(self) -> list[Piece]:
        """The answer has ended: what was held back."""
        ...


class _Text:
    """Text around calls. Whitespace at its end waits: behind it there may be nothing but calls."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> list[Piece]:
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return [shown] if shown else []

    def finish(self, num_calls: int) -> list[Piece]:
        return [self._held] if self._held and not num_calls else []


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, anywhere in the text."""

    def __init__(self, max_calls: int | None = None) -> None:
        """max_calls: further ones are dropped."""
        self.num_calls = 0
        self._max_calls = max_calls
        self._text = _Text()
        self._pending = ""  # outside of calls: what could become a tag
        self._raw = ""  # of a call whose name is not known yet
        self._call: CallReader | None = None
        self._awaits_close = False  # behind a call, before its closing tag

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            if self._call is None:
                at = self._outside(text, at, pieces)
            else:
                end = at + self._call.run_len(text, at)
                self._inside(self._call, text[at:end], pieces)
                at = end
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None and self._call.name is None:
            pieces += self._text.add(self._raw)
        self._pass(self._pending, pieces)
        return pieces + self._text.finish(self.num_calls)

    def _outside(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Look for the next tag; returns where reading goes on."""
        joined = self._pending + text[at:]
        tags = (CLOSE, OPEN) if self._awaits_close else (OPEN,)
        places = [(joined.find(tag), tag) for tag in tags if tag in joined]
        if not places:
            end = len(joined) - held_len(joined, tags)
            self._pass(joined[:end], pieces)
            self._pending = joined[end:]
            return len(text)
        place, tag = min(places)
        self._pass(joined[:place], pieces)
        next_at = at + place + len(tag) - len(self._pending)
        self._pending, self._awaits_close = "", False
        if tag == OPEN:
            self._call, self._raw = CallReader(self.num_calls), OPEN
        return next_at

    def _pass(self, text: str, pieces: list[Piece]) -> None:
        """Text between calls; what stands before a closing tag is none."""
        if not self._awaits_close:
            pieces += self._text.add(text)

    def _inside(self, call: CallReader, run: str, pieces: list[Piece]) -> None:
        was_named = call.name is not None
        found = call.feed(run)
        if self._max_calls is None or call.index < self._max_calls:
            pieces += found
        if not was_named:
            self._raw += run
            self.num_calls += call.name is not None
        if call.is_over or call.is_broken:
            self._leave(call, pieces)

    def _leave(self, call: CallReader, pieces: list[Piece]) -> None:
        self._call = None
        if call.name is not None:
            self._awaits_close = True
            return
        pieces += self._text.add(OPEN)  # it was no call: its text is the answer's
        pieces += self.feed(self._raw[len(OPEN) :])


class LlamaParser:
    """`{"name": ..., "parameters": ...}` as the whole answer; several are parted by semicolons.

    Any other object is the answer's text: only known names make a call.
    """

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        """names: of the tools; max_calls: further ones are dropped."""
        self.num_calls = 0
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._text = _Text()
        self._lead = ""  # what stands before the next object: whitespace, a tag, a semicolon
        self._raw = ""
        self._call: CallReader | None = None
        self._is_text = False  # no call can follow

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            if self._is_text:
                return pieces + self._text.add(text[at:])
            end = at + (1 if self._call is None else self._call.run_len(text, at))
            if self._call is None:
                self._between(text[at], pieces)
            else:
                self._inside(self._call, text[at:end], pieces)
            at = end
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None and not self._is_call(self._call):
            self._lead += self._raw
        if self.num_calls == 0 or self._raw:
            pieces += self._text.add(self._lead)
        return pieces + self._text.finish(self.num_calls)

    def _is_call(self, call: CallReader) -> bool:
        return call.name is not None and call.name in self._names

    def _between(self, character: str, pieces: list[Piece]) -> None:
        if character == "{":
            self._call, self._raw = CallReader(self.num_calls), ""
            self._inside(self._call, character, pieces)
            return
        self._lead += character
        lead = self._lead.strip(WHITESPACE + (";" if self.num_calls else ""))
        if not PYTHON_TAG.startswith(lead):
            self._give_up(pieces)

    def _inside(self, call: CallReader, run: str, pieces: list[Piece]) -> None:
        was_named = call.name is not None
        found = call.feed(run)
        if not was_named:
            self._raw += run
            self.num_calls += self._is_call(call)
        is_call = self._is_call(call)
        if is_call:
            self._lead = self._raw = ""
            if self._max_calls is None or call.index < self._max_calls:
                pieces += found
        if (call.is_over or call.is_broken) and is_call:
            self._call = None
        elif call.is_broken or (call.name is not None and not is_call):
            self._give_up(pieces)

    def _give_up(self, pieces: list[Piece]) -> None:
        pieces += self._text.add(self._lead + self._raw)
        self._lead = self._raw = ""
        self._call, self._is_text = None, True


def held_len(text: str, tags: Collection[str]) -> int:
    """Characters at the end of `text` that could become one of the tags."""
    longest = min(len(text), max(map(len, tags)) - 1)
    lengths = range(longest, 0, -1)
    return next((n for n in lengths if any(tag.startswith(text[-n:]) for tag in tags)), 0)
