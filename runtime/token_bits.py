"""Sets of tokens as packed bits, the form in which masks travel: bit i % 32 of word i // 32.

Knows nothing of why a token is allowed.
"""

from collections.abc import Iterable

import numpy as np


def num_words(vocab_size: int) -> int:
    """Words that hold one bit per token."""
    return -(-vocab_size // 32)


def pack(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """int32 [num_words], the bits of `token_ids` set; ids outside the vocabulary are left out."""
    flags = np.zeros(num_words(vocab_size) * 32, dtype=bool)  # [num_words * 32]
    flags[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def unpack(words: np.ndarray) -> list[int]:
    """The token ids whose bits are set, ascending."""
    flags = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(flags).tolist()
