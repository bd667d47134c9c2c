"""One tool call's JSON object as it streams in: its name first, then pieces of its arguments.

Knows nothing of what stands around a call.
"""

import dataclasses
import json

from zipage_lang.server.openai.json_scan import Event, ObjectScanner

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("name", "type", "id", *ARGUMENT_KEYS)
# Never outside of JSON's quotes. What looked like a call up to there is read again as text, so
# without this a text of nested half calls would be read once for each of them.
NEVER_BARE = frozenset("<\\")


@dataclasses.dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a call: its name comes first, alone; the arguments follow as JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


class CallReader:
    """One call's JSON object: a name, and arguments once the name is known."""

    def __init__(self, index: int) -> None:
        self.is_over = self.is_broken = False
        self.name: str | None = None
        self.index = index
        self._scanner = ObjectScanner()
        self._key = ""
        self._value: list[str] = []  # pieces of the text, which can be long
        self._arguments: str | None = None  # written before the name was known
        self._has_arguments = False

    def run_len(self, text: str, at: int) -> int:
        """How much of `text` from `at` on `feed` takes at once."""
        return self._scanner.run_len(text, at)

    def feed(self, run: str) -> list[CallPiece]:
        if self.name is None and run in NEVER_BARE and not self._scanner.is_quoted:
            self.is_broken = True
            return []
        pieces: list[CallPiece] = []
        for event, text in self._scanner.feed(run):
            if event is Event.KEY:
                self._key, self._value = text, []
                self.is_broken |= self.name is None and text not in CALL_KEYS
            elif event is Event.VALUE:
                pieces += self._add(text)
            elif event is Event.VALUE_END:
                pieces += self._end_value()
            elif event is Event.END:
                pieces += self._end()
            elif event is Event.BROKEN:
                self.is_broken = True
        return pieces

    @property
    def _is_object(self) -> bool:
        """Whether the value is streamed as it comes: texts and words wait until they are whole."""
        return self._value[0] == "{"

    def _add(self, text: str) -> list[CallPiece]:
        self._value.append(text)
        if self.name is None or self._key not in ARGUMENT_KEYS or self._has_arguments:
            return []
        return [CallPiece(self.index, arguments=text)] if self._is_object else []

    def _end_value(self) -> list[CallPiece]:
        if self._key == "name" and self.name is None:
            return self._take_name()
        if self._key not in ARGUMENT_KEYS or self._has_arguments:
            return []
        if self.name is None:
            self._arguments = _as_object("".join(self._value))
            return []
        self._has_arguments = True
        return [] if self._is_object else self._told(_as_object("".join(self._value)))

    def _take_name(self) -> list[CallPiece]:
        try:
            name = json.loads("".join(self._value))
        except ValueError:
            name = None
        if not isinstance(name, str) or not name:
            self.is_broken = True
            return []
        self.name = name
        begun: list[CallPiece] = [CallPiece(self.index, name=name)]
        if self._arguments is None:
            return begun
        self._has_arguments = True
        return begun + self._told(self._arguments)

    def _end(self) -> list[CallPiece]:
        self.is_over = True
        self.is_broken |= self.name is None
        return [] if self._has_arguments or self.is_broken else self._told("{}")

    def _told(self, arguments: str) -> list[CallPiece]:
        return [CallPiece(self.index, arguments=arguments)]


def _as_object(value: str) -> str:
    """Arguments as a text of a JSON object: some models quote it once more, or write null."""
    try:
        meant = json.loads(value)
    except ValueError:
        return value
    if isinstance(meant, str):
        return meant or "{}"
    return "{}" if meant is None else value
