"""Finds stop strings in a text that arrives in pieces, and holds back what could become one.

Knows nothing of tokens beyond their count, or of where the text comes from.

An Aho-Corasick automaton over all stop strings: its state after some text is the longest suffix of
that text which is a prefix of a stop string. That suffix is exactly what must be held back, so each
character costs the same whether there is one stop string or a thousand.
"""

import functools
from collections import deque


class StopAutomaton:
    """The stop strings as a trie with failure links. State 0 is the root: nothing held back."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self.held_len: list[int] = [0]  # characters a state holds back
        self.match: list[str | None] = [None]  # longest stop string that ends in a state
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._edges[state]:
            state = self._fallback[state]
        return self._edges[state].get(character, 0)

    def _insert(self, stop_string: str) -> None:
        state = 0
        for character in stop_string:
            if character not in self._edges[state]:
                self._edges[state][character] = self._add_state(self.held_len[state] + 1)
            state = self._edges[state][character]
        self.match[state] = stop_string

    def _add_state(self, held_len: int) -> int:
        self._edges.append({})
        self._fallback.append(0)
        self.held_len.append(held_len)
        self.match.append(None)
        return len(self._edges) - 1

    def _link(self) -> None:
        """Breadth first, so that a state's fallback, which is shorter, is complete before it."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self._fallback[state]]
            for character, child in self._edges[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                queue.append(child)


@functools.lru_cache(maxsize=64)
def stop_automaton(stop_strings: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings; a program sends the same ones with every request."""
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
