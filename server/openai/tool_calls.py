"""Tool calls told apart from the text around them, while both stream in.

However a text is cut into pieces, the same calls and the same text come out.
Knows nothing of templates, grammars, tokens or of how replies are written.
"""

import re
from collections.abc import Collection
from typing import Protocol

from zipage_lang.server.openai.call_reader import CallPiece, CallReader
from zipage_lang.server.openai.json_scan import WHITESPACE

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
LOOK_LEN = 4096  # characters in which a tag is looked for at a time
PARTING = re.compile(f"[{WHITESPACE}]+")  # what may stand before Llama's first object
LATER_PARTING = re.compile(f"[{WHITESPACE};]+")  # and between two of them

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
        self._held: list[str] = []  # pieces of it, which can be many

    def add(self, text: str) -> list[Piece]:
        shown = text.rstrip()
        if not shown:
            self._held.append(text)
            return []
        told = "".join((*self._held, shown))
        self._held = [text[len(shown) :]]
        return [told]

    def finish(self, num_calls: int) -> list[Piece]:
        held = "".join(self._held)
        return [held] if held and not num_calls else []


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, anywhere in the text."""

    def __init__(self, max_calls: int | None = None) -> None:
        """max_calls: further ones are dropped."""
        self.num_calls = 0
        self._max_calls = max_calls
        self._text = _Text()
        self._pending = ""  # outside of calls: what could become a tag
        self._raw: list[str] = []  # of a call whose name is not known yet, behind its tag
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
            pieces += self._text.add(OPEN + "".join(self._raw))
        self._pass(self._pending, pieces)
        return pieces + self._text.finish(self.num_calls)

    def _outside(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Look for the next tag; returns where reading goes on."""
        joined = self._pending + text[at : at + LOOK_LEN]
        tags = (CLOSE, OPEN) if self._awaits_close else (OPEN,)
        places = [(joined.find(tag), tag) for tag in tags if tag in joined]
        if not places:
            end = len(joined) - held_len(joined, tags)
            self._pass(joined[:end], pieces)
            self._pending = joined[end:]
            return at + LOOK_LEN
        place, tag = min(places)
        self._pass(joined[:place], pieces)
        next_at = at + place + len(tag) - len(self._pending)
        self._pending, self._awaits_close = "", False
        if tag == OPEN:
            self._call, self._raw = CallReader(self.num_calls), []
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
            self._raw.append(run)
            self.num_calls += call.name is not None
        if call.is_over or call.is_broken:
            self._leave(call, pieces)

    def _leave(self, call: CallReader, pieces: list[Piece]) -> None:
        self._call = None
        if call.name is not None:
            self._awaits_close = True
            return
        pieces += self._text.add(OPEN)  # it was no call: its text is the answer's
        pieces += self.feed("".join(self._raw))


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
        self._lead: list[str] = []  # what stands before the next object
        self._mark = ""  # the same without what parts calls: the tag, as far as it has come
        self._raw: list[str] = []
        self._call: CallReader | None = None
        self._is_text = False  # no call can follow

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            if self._is_text:
                return pieces + self._text.add(text[at:])
            if self._call is None:
                at = self._between(text, at, pieces)
            else:
                end = at + self._call.run_len(text, at)
                self._inside(self._call, text[at:end], pieces)
                at = end
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None and not self._is_call(self._call):
            self._lead += self._raw
        if self.num_calls == 0 or self._raw:
            pieces += self._text.add("".join(self._lead))
        return pieces + self._text.finish(self.num_calls)

    def _is_call(self, call: CallReader) -> bool:
        return call.name is not None and call.name in self._names

    def _between(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Take a character, or all of a run that parts calls; returns where reading goes on."""
        parting = (LATER_PARTING if self.num_calls else PARTING).match(text, at)
        run = parting[0] if parting else text[at]
        if run == "{":
            self._call, self._raw = CallReader(self.num_calls), []
            self._inside(self._call, run, pieces)
            return at + 1
        self._lead.append(run)
        if parting is None:
            self._mark += run
            if not PYTHON_TAG.startswith(self._mark):
                self._give_up(pieces)
        elif self._mark:  # a tag does not go on behind it
            self._mark = self._mark.rstrip(" ") + " "
        return at + len(run)

    def _inside(self, call: CallReader, run: str, pieces: list[Piece]) -> None:
        was_named = call.name is not None
        found = call.feed(run)
        if not was_named:
            self._raw.append(run)
            self.num_calls += self._is_call(call)
        is_call = self._is_call(call)
        if is_call:
            self._lead, self._mark, self._raw = [], "", []
            if self._max_calls is None or call.index < self._max_calls:
                pieces += found
        if (call.is_over or call.is_broken) and is_call:
            self._call = None
        elif call.is_broken or (call.name is not None and not is_call):
            self._give_up(pieces)

    def _give_up(self, pieces: list[Piece]) -> None:
        pieces += self._text.add("".join((*self._lead, *self._raw)))
        self._lead, self._mark, self._raw = [], "", []
        self._call, self._is_text = None, True


def held_len(text: str, tags: Collection[str]) -> int:
    """Characters at the end of `text` that could become one of the tags."""
    longest = min(len(text), max(map(len, tags)) - 1)
    lengths = range(longest, 0, -1)
    return next((n for n in lengths if any(tag.startswith(text[-n:]) for tag in tags)), 0)
