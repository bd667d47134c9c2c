"""Token ids to printable text, piece by piece, never half a character.

Knows nothing of stop strings, requests or which library tokenised.

Two ways, with equal results on text that is whole:
- `ByteDetokenizer` for byte-level vocabularies (Llama 3, Qwen, SmolLM2): each token is a fixed run
  of bytes, so an incremental UTF-8 decoder does it exactly and at constant cost.
- `WindowDetokenizer` for all others, whose decoders look at neighbours (a leading space, byte
  tokens): decodes a short window of the last tokens again and shows what is new.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MIN_WINDOW_LEN = 8  # tokens of context that a window keeps when it moves on
MAX_WINDOW_LEN = 32
MAX_WAIT = 8  # tokens; a character has at most four bytes


class Detokenizer(Protocol):
    """What a stream of one sample's tokens goes through."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """New printable text; what ends in half a character waits for the next call."""
        ...

    def flush(self) -> str:
        """The rest, at the end of the output; half a character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For vocabularies where each token is bytes; `token_bytes(token_id)` is b"" to skip one."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any vocabulary. `decode(token_ids)` is the tokenizer's decode of a whole list.

    `adds_nothing(token_id)` tells the tokens that `decode` leaves out wherever they stand, say
    special ones: they must not part the two halves of a character, nor use up its wait.
    Trailing U+FFFD waits, since it may be half a character, but not for ever: bytes that are still
    none after MAX_WAIT tokens are broken. (A decoder that marks a whole run of byte tokens once one
    of them proves broken can't take back what was shown; on such text the results may differ.)
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        adds_nothing: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._decode = decode
        self._adds_nothing = adds_nothing
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were given out
        self._num_waits = 0  # tokens in a row after which the text ended in U+FFFD
        self._move_at = MAX_WINDOW_LEN

    def feed(self, token_ids: Sequence[int]) -> str:
        shown = (self._feed_one(id_) for id_ in token_ids if not self._adds_nothing(id_))
        return "".join(shown)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        self._num_waits = self._num_waits + 1 if text.endswith(REPLACEMENT) else 0
        waits = 0 < self._num_waits <= MAX_WAIT
        shown = self._show(text.rstrip(REPLACEMENT) if waits else text)
        if len(self._window) >= self._move_at and not waits:
            self._move_window(text)
        return shown

    def _show(self, text: str) -> str:
        new = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return new

    def _move_window(self, text: str) -> None:
        """Forget all but the last tokens, cut where their own text is how the whole one ends."""
        for num_kept in range(MIN_WINDOW_LEN, 2 * MIN_WINDOW_LEN):
            kept = self._window[-num_kept:]
            kept_text = self._decode(kept)
            if kept_text and text.endswith(kept_text):
                self._window, self._num_shown = kept, len(kept_text)
                self._move_at = MAX_WINDOW_LEN
                return
        # No clean cut here: looking again at twice the length keeps the cost per token bounded.
        self._move_at = 2 * len(self._window)
