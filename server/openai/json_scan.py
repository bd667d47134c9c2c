"""Follows one JSON object as it is written and tells its members while they are written.

Only what is needed to find the ends of members is checked; what stands inside a value is not.
Knows nothing of tool calls or of models.
"""

import enum
import json
import re
from typing import NamedTuple

WHITESPACE = " \t\n\r"
_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"\\]+')


class Event(enum.Enum):
    """What a character brought to an end, or added to."""

    NOTHING = "nothing"
    KEY = "key"  # text: the key, decoded
    VALUE = "value"  # text: more of the value as it is written
    VALUE_END = "value_end"  # the value is whole
    END = "end"  # the object is closed
    BROKEN = "broken"  # no JSON object


class Found(NamedTuple):
    event: Event
    text: str = ""


class _State(enum.Enum):
    START = "start"
    FIRST_KEY = "first_key"
    KEY = "key"
    COLON = "colon"
    VALUE = "value"
    IN_VALUE = "in_value"
    COMMA = "comma"
    NEXT_KEY = "next_key"
    DONE = "done"


NOTHING = Found(Event.NOTHING)
BROKEN = Found(Event.BROKEN)
END = Found(Event.END)
VALUE_END = Found(Event.VALUE_END)


class ObjectScanner:
    """One object. Feed it characters, or runs of them, until it says END or BROKEN."""

    def __init__(self) -> None:
        self._state = _State.START
        self._key: list[str] = []  # its characters: it can be long
        self._brackets: list[str] = []  # that must still close, in the value
        self._is_quoted = self._is_escaped = False
        self._kind = ""  # first character of the value

    @property
    def is_quoted(self) -> bool:
        """Whether the next character belongs to a text: a key, a value or a part of one."""
        if self._state is _State.KEY:
            return True
        return self._state is _State.IN_VALUE and self._is_quoted

    def run_len(self, text: str, at: int) -> int:
        """How much of `text` from `at` on `feed` takes at once: in quotes, up to the next mark."""
        is_plain = self._state is _State.IN_VALUE and self._is_quoted and not self._is_escaped
        run = _PLAIN.match(text, at) if is_plain else None
        return len(run[0]) if run else 1

    def feed(self, character: str) -> list[Found]:
        """What a character means, or a run; a bare value is ended by the character behind it."""
        if self._state is _State.IN_VALUE:
            return self._in_value(character)
        if self._state is _State.KEY:
            return [self._in_key(character)]
        if character in WHITESPACE:
            return []
        return [self._between(character)]

    def _between(self, character: str) -> Found:
        state = self._state
        if state is _State.START:
            return self._expect(character, "{", _State.FIRST_KEY)
        if state is _State.COLON:
            return self._expect(character, ":", _State.VALUE)
        if state is _State.VALUE:
            return self._begin_value(character)
        if character == "}" and state in (_State.FIRST_KEY, _State.COMMA):
            self._state = _State.DONE
            return END
        if state is _State.COMMA:
            return self._expect(character, ",", _State.NEXT_KEY)
        self._key = [character]
        return self._expect(character, '"', _State.KEY)

    def _expect(self, character: str, wanted: str, state: _State) -> Found:
        if character != wanted or self._state is _State.DONE:
            return BROKEN
        self._state = state
        return NOTHING

    def _in_key(self, character: str) -> Found:
        self._key.append(character)
        if self._is_escaped or character != '"':
            self._is_escaped = character == "\\" and not self._is_escaped
            return NOTHING
        self._state = _State.COLON
        try:
            return Found(Event.KEY, json.loads("".join(self._key)))
        except ValueError:
            return BROKEN

    def _begin_value(self, character: str) -> Found:
        if character in ",:}]":
            return BROKEN
        self._state, self._kind = _State.IN_VALUE, character
        self._is_quoted = character == '"'
        self._brackets = [_CLOSING[character]] if character in _CLOSING else []
        return Found(Event.VALUE, character)

    def _in_value(self, character: str) -> list[Found]:
        if self._is_quoted:
            return self._in_quotes(character)
        if not self._brackets:
            return self._in_bare(character)
        if character in _CLOSING:
            self._brackets.append(_CLOSING[character])
        elif character in "}]":
            if character != self._brackets.pop():
                return [BROKEN]
        elif character == '"':
            self._is_quoted = True
        return self._more(character, is_whole=not self._brackets)

    def _in_quotes(self, character: str) -> list[Found]:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_quoted = False
        is_whole = not self._is_quoted and not self._brackets
        return self._more(character, is_whole=is_whole)

    def _in_bare(self, character: str) -> list[Found]:
        """A number or a word."""
        if character in WHITESPACE or character in ",}":
            self._state = _State.COMMA
            return [VALUE_END, *self.feed(character)]
        return [BROKEN] if character in '"{[]:' else [Found(Event.VALUE, character)]

    def _more(self, character: str, *, is_whole: bool) -> list[Found]:
        found = [Found(Event.VALUE, character)]
        if is_whole:
            self._state = _State.COMMA
            found.append(VALUE_END)
        return found
