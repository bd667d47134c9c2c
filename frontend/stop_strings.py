"""Finds stop strings in a text that arrives in pieces, and holds back what could become one.

Knows nothing of tokens beyond their count, or of where the text comes from.

An Aho-Corasick automaton over all stop strings: its state after some text is the longest suffix of
that text which is a prefix of a stop string. That suffix is exactly what must be held back, so each
character costs the same whether there is one stop string or a thousand.
"""

import functools
import weakref

SMALL = 1024  # characters of stop strings whose automaton is kept for later requests


class StopAutomaton:
    """The stop strings as a trie with failure links. State 0 is the root: nothing held back.

    All edges stand in one dict, by `_edge`: a dict per state would take several times the memory.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._edges: dict[int, int] = {}
        self._fallback: list[int] = [0]
        self.held_len: list[int] = [0]  # characters a state holds back
        self.match: list[str | None] = [None]  # longest stop string that ends in a state
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        edges, code = self._edges, ord(character)
        while state and _edge(state, code) not in edges:
            state = self._fallback[state]
        return edges.get(_edge(state, code), 0)

    def _insert(self, stop_string: str) -> None:
        state = 0
        for character in stop_string:
            edge = _edge(state, ord(character))
            if edge not in self._edges:
                self._edges[edge] = self._add_state(self.held_len[state] + 1)
            state = self._edges[edge]
        self.match[state] = stop_string

    def _add_state(self, held_len: int) -> int:
        self._fallback.append(0)
        self.held_len.append(held_len)
        self.match.append(None)
        return len(self.held_len) - 1

    def _link(self) -> None:
        """Shortest first, so that a state's fallback, which is shorter, is complete before it."""
        for edge, child in sorted(self._edges.items(), key=lambda item: self.held_len[item[1]]):
            state, code = edge >> 21, edge & 0x1FFFFF
            if state:
                self._fallback[child] = self.step(self._fallback[state], chr(code))
            if self.match[child] is None:
                self.match[child] = self.match[self._fallback[child]]


def _edge(state: int, code: int) -> int:
    """A state and the next character, which takes 21 bits."""
    return state << 21 | code


_in_use: "weakref.WeakValueDictionary[tuple[str, ...], StopAutomaton]" = (
    weakref.WeakValueDictionary()
)


def stop_automaton(stop_strings: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings, one for all who use it at a time.

    A program sends the same few with every request, so small ones are kept for later.
    """
    if sum(map(len, stop_strings)) <= SMALL:
        return _small_automaton(stop_strings)
    found = _in_use.get(stop_strings)
    if found is None:
        found = _in_use[stop_strings] = StopAutomaton(stop_strings)
    return found


@functools.lru_cache(maxsize=64)
def _small_automaton(stop_strings: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stop_strings)


class StopMatcher:
    """Watches one sample's text for stop strings.

    The match whose end comes first wins; of two that end together, the longer. Before `min_tokens`
    output tokens a stop string is ordinary text.
    """

    def __init__(self, stop_strings: tuple[str, ...], min_tokens: int = 0) -> None:
        self._automaton = stop_automaton(stop_strings)
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, num_output_tokens: int) -> str:
        """Take the text of the latest token(s); return what can be shown now.

        After a match (`matched` is set) the match and all behind it is dropped.
        """
        if self.matched is not None:
            return ""
        honoured = num_output_tokens >= self._min_tokens
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.step(self._state, character)
            match = self._automaton.match[self._state]
            if honoured and match is not None:
                self.matched, self._held = match, ""
                return pending[: index - len(match)]
        num_shown = len(pending) - self._automaton.held_len[self._state]
        self._held = pending[num_shown:]
        return pending[:num_shown]

    def flush(self) -> str:
        """The output has ended: what was held back is ordinary text."""
        held, self._held, self._state = self._held, "", 0
        return held
