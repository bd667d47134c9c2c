"""A fuzzer's bytes as decisions: numbers, texts, JSON-like values, values with a few parts changed.

Knows nothing of what is fuzzed. The same bytes make the same decisions, and where they run out all
further decisions are the first choice, so any bytes are a whole input.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS = (0, 1, -1, 2, 7, 64, 255, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 10**30)
REALS = (0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"))
SIGNS = ("", "\x00", "\n", "é", "你", "👋🏽", "\ud800", "\ufffd", "\u2028", "{{", "<|im_end|>", "%")
MAX_DEPTH = 4


class Choices:
    """Reads one input from its front."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        if self.is_over:
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1, one or two bytes of it."""
        return (self.byte() if limit <= 256 else self.byte() * 256 + self.byte()) % limit

    def flag(self) -> bool:
        return self.byte() % 2 == 1

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def take(self, limit: int) -> bytes:
        """Up to `limit` bytes, as many as the next byte says."""
        start, self._at = self._at + 1, min(len(self._data), self._at + 1 + self.below(limit + 1))
        return self._data[start : self._at]

    def rest(self) -> bytes:
        start, self._at = self._at, len(self._data)
        return self._data[start:]

    def text(self, limit: int = 24) -> str:
        """Text of up to `limit` bytes, or one of the signs that have broken programs before."""
        if self.below(6) == 5:
            return self.pick(SIGNS)
        return self.take(limit).decode("utf-8", "ignore")

    def pieces(self, text: str, limit: int = 5) -> list[str]:
        """The text, cut anywhere."""
        found, at = [], 0
        while at < len(text):
            size = 1 + self.below(limit)
            found.append(text[at : at + size])
            at += size
        return found

    def value(self, words: Sequence[str] = (), depth: int = 0) -> Any:
        """Anything that JSON can write, and the floats that it can't."""
        kind = self.below(9 if depth < MAX_DEPTH else 7)
        if kind == 0:
            return None
        if kind == 1:
            return self.flag()
        if kind == 2:
            return self.pick(NUMBERS)
        if kind == 3:
            return self.pick(REALS)
        if kind == 4:
            return self.byte()
        if kind == 5:
            return self.text()
        if kind == 6:
            return self.pick(words) if words else self.text()
        if kind == 7:
            return [self.value(words, depth + 1) for _ in range(self.below(4))]
        names = [
            self.pick(words) if words and self.flag() else self.text(8)
            for _ in range(self.below(4))
        ]
        return {name: self.value(words, depth + 1) for name in names}

    def changed(self, value: Any, words: Sequence[str] = ()) -> Any:
        """A copy of a JSON-like value in which up to three parts are replaced, added or removed."""
        whole = [copy.deepcopy(value)]
        for _ in range(self.below(4)):
            self._change(whole, words)
        return whole[0]

    def _change(self, whole: list[Any], words: Sequence[str]) -> None:
        place: Any = whole
        key: Any = 0
        while isinstance(place[key], dict | list) and place[key] and self.below(4):
            place = place[key]
            key = self.pick(list(place)) if isinstance(place, dict) else self.below(len(place))
        act = self.below(4)
        if act == 1 and place is not whole:
            del place[key]
        elif act == 2 and isinstance(place[key], dict):
            place[key][self.pick(words) if words else self.text(8)] = self.value(words)
        elif act == 3 and isinstance(place[key], list):
            place[key] += [self.value(words)] * (1 + self.below(3))
        else:
            place[key] = self.value(words)

    def damaged(self, data: bytes) -> bytes:
        """The bytes with up to three runs replaced, repeated, removed or added."""
        for _ in range(self.below(4)):
            at, size = self.below(len(data) + 1), self.below(16)
            act = self.below(4)
            if act == 0:
                data = data[:at] + self.take(16) + data[at + size :]
            elif act == 1:
                data = data[:at] + data[at : at + size] * 2 + data[at + size :]
            elif act == 2:
                data = data[:at] + data[at + size :]
            else:
                number = self.pick(NUMBERS) % 2**64
                data = data[:at] + number.to_bytes(8, "little") + data[at + 8 :]
        return data


def words_of(*values: Any) -> tuple[str, ...]:
    """All names and texts that stand anywhere in JSON-like values."""
    found: dict[str, None] = {}
    todo = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            found[value] = None
        elif isinstance(value, Mapping):
            todo += [*value, *value.values()]
        elif isinstance(value, Sequence):
            todo += value
    return tuple(sorted(found))
