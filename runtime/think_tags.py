"""The tags around thinking, as bytes, and which tokens would complete one: tables made once.

A tag may be one token or be spelled by several, in more than one way; so tags are looked for in
the bytes, by the automaton of Knuth, Morris and Pratt (1977): its state is the length of the
longest end of what was read that a tag begins with.
Knows nothing of requests, of counts, or of what a finished tag leads to.
"""

import numpy as np

from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.runtime.token_bits import pack
from zipage_lang.runtime.vocabulary import Vocabulary


class Tag:
    """One byte string to be watched for."""

    def __init__(self, text: bytes, vocabulary: Vocabulary) -> None:
        self.text = text
        self._vocabulary = vocabulary
        self._fallback = _fallbacks(text)
        self._candidates = [
            (token_id, piece)
            for token_id, piece in enumerate(vocabulary.pieces)
            if text[-1] in piece
        ]
        self._completing: dict[int, np.ndarray] = {}
        self._crossing: dict[int, np.ndarray] = {}

    def read(self, state: int, data: bytes) -> tuple[int, int | None]:
        """The state after `data`, and how many bytes of it complete the tag first (or None)."""
        for at, byte in enumerate(data, start=1):
            while state and self.text[state] != byte:
                state = self._fallback[state]
            state += self.text[state] == byte
            if state == len(self.text):
                return state, at
        return state, None

    def completing(self, state: int) -> np.ndarray:
        """int32 [num_words], the tokens that complete the tag from `state`, wherever in them."""
        if state not in self._completing:
            self._make_tables(state)
        return self._completing[state]

    def crossing(self, state: int) -> np.ndarray:
        """int32 [num_words], those of `completing` that go on behind the tag."""
        if state not in self._crossing:
            self._make_tables(state)
        return self._crossing[state]

    def _make_tables(self, state: int) -> None:
        ends = {token_id: self.read(state, piece)[1] for token_id, piece in self._candidates}
        pieces, size = self._vocabulary.pieces, len(self._vocabulary.pieces)
        completing = [token_id for token_id, end in ends.items() if end is not None]
        crossing = [token_id for token_id in completing if ends[token_id] != len(pieces[token_id])]
        self._completing[state] = pack(completing, size)
        self._crossing[state] = pack(crossing, size)


class ThinkTags:
    """All tags of one ThinkParams on one vocabulary, and the tokens of what is forced."""

    def __init__(self, params: ThinkParams, vocabulary: Vocabulary) -> None:
        """Raises ValueError where the vocabulary can't spell a tag, or `closing` lacks the end."""
        self.params = params
        self.vocabulary = vocabulary
        end_ids = params.end_token_ids
        self.start = vocabulary.bytes_of(params.start_token_ids) or params.start_text.encode()
        end = vocabulary.bytes_of(end_ids) or params.end_text.encode()
        self.end = Tag(end, vocabulary)
        self.tools = tuple(Tag(text.encode(), vocabulary) for text in params.tool_starts)
        self.closing = _closing(params, end)
        if self.closing.count(end) != 1:
            raise ValueError(
                f"think closing_text {self.closing!r} must hold the end tag {end!r} once"
            )
        self.start_ids = params.start_token_ids or vocabulary.spell(self.start)
        self.closing_ids = self._spell_closing(self.closing, end)
        self._opening: dict[tuple[int, bool], np.ndarray] = {}
        self.opening(0, True)  # looks at every token: not while others wait for a step

    def rest_of_closing(self, end_state: int) -> tuple[int, ...]:
        """The tokens to be forced where the first `end_state` bytes of the end tag are written:
        they are gone on with, except where the tag has a token of its own."""
        if end_state == 0 or self.end.text in self.vocabulary.ids:
            return self.closing_ids
        behind = self.closing.partition(self.end.text)[2]
        return self.vocabulary.spell(self.end.text[end_state:] + behind)

    def opening(self, num_matched: int, may_lead: bool) -> np.ndarray:
        """int32 [num_words], tokens that go on with the start tag behind `num_matched` bytes.

        may_lead: whitespace may stand before it.
        """
        key = (num_matched, may_lead)
        if key not in self._opening:
            rest = self.start[num_matched:]
            pieces = enumerate(self.vocabulary.pieces)
            texts = ((i, piece.lstrip() if may_lead else piece) for i, piece in pieces if piece)
            going_on = (i for i, text in texts if rest.startswith(text) or text.startswith(rest))
            self._opening[key] = pack(going_on, len(self.vocabulary.pieces))
        return self._opening[key]

    def _spell_closing(self, closing: bytes, end: bytes) -> tuple[int, ...]:
        ids = self.params.end_token_ids
        if not ids:
            return self.vocabulary.spell(closing)
        before, _, behind = closing.partition(end)
        return (*self.vocabulary.spell(before), *ids, *self.vocabulary.spell(behind))


def _closing(params: ThinkParams, end: bytes) -> bytes:
    if params.closing_text is None:
        return b"\n" + end + b"\n\n"
    return params.closing_text.encode()


def _fallbacks(text: bytes) -> list[int]:
    """fallbacks[s]: the longest proper end of text[:s] that text begins with."""
    fallbacks = [0, 0]
    for at in range(1, len(text)):
        state = fallbacks[at]
        while state and text[state] != text[at]:
            state = fallbacks[state]
        fallbacks.append(state + (text[state] == text[at]))
    return fallbacks
