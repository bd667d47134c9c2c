"""Tokenizers without a model, for scripted backends.

Knows nothing of replies, requests or programs.
"""

import re
from typing import Protocol

BEGIN, END = "<|im_start|>", "<|im_end|>"
SPECIALS = (END, BEGIN)
EOS_TOKEN_ID = 0  # END


class ScriptTokenizer(Protocol):
    """Text to tokens and back; END is token 0 and BEGIN is token 1."""

    def encode(self, text: str) -> list[int]: ...

    def spell(self, token_id: int) -> bytes: ...


class ByteTokenizer:
    """One token for each byte of UTF-8.

    Parameters: none. Errors: none.

    >>> zipage.testing.ByteTokenizer().encode("AB")
    [67, 68]
    """

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for piece in _split_specials(text):
            special = piece in SPECIALS
            token_ids += [SPECIALS.index(piece)] if special else [b + 2 for b in piece.encode()]
        return token_ids

    def spell(self, token_id: int) -> bytes:
        return SPECIALS[token_id].encode() if token_id < 2 else bytes([token_id - 2])


class WordTokenizer:
    """One token for each word with the space before it; ids are given as words are met.

    Parameters: none. Errors: none.

    >>> zipage.testing.WordTokenizer().encode("one two one two")
    [2, 3, 4, 3]
    """

    def __init__(self) -> None:
        self._words = list(SPECIALS)
        self._ids = {word: token_id for token_id, word in enumerate(self._words)}

    def encode(self, text: str) -> list[int]:
        pieces = _split_specials(text)
        words = [w for p in pieces for w in ([p] if p in SPECIALS else _words(p))]
        return [self._id_of(word) for word in words]

    def spell(self, token_id: int) -> bytes:
        return self._words[token_id].encode()

    def _id_of(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


def _split_specials(text: str) -> list[str]:
    pattern = "|".join(re.escape(special) for special in SPECIALS)
    return [piece for piece in re.split(f"({pattern})", text) if piece]


def _words(text: str) -> list[str]:
    return re.findall(r"\s?\S+|\s", text)
