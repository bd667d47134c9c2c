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

    Trailing U+FFFD waits, since it may be half a character. A decoder that turns a whole run of
    byte tokens into U+FFFD once the run proves invalid can't take back what was already shown.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were given out
        self._move_at = MAX_WINDOW_LEN

    def feed(self, token_ids: Sequence[int]) -> str:
        shown = []
        for token_id in token_ids:
            self._window.append(token_id)
            text = self._decode(self._window)
            shown.append(self._show(text.rstrip(REPLACEMENT)))
            if len(self._window) >= self._move_at:
                self._move_window(text)
        return "".join(shown)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        new = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return new

    def _move_window(self, text: str) -> None:
        """Forget all but the last tokens, cut where their own text is how the whole one ends."""
        longest = min(len(self._window), 2 * MIN_WINDOW_LEN)
        for num_kept in range(MIN_WINDOW_LEN, longest):
            kept = self._window[-num_kept:]
            kept_text = self._decode(kept)
            if kept_text and REPLACEMENT not in kept_text and text.endswith(kept_text):
                self._window, self._num_shown = kept, len(kept_text)
                self._move_at = MAX_WINDOW_LEN
                return
        # No clean cut here (say, a long run of broken bytes): looking again at twice the length
        # keeps the cost per token bounded on average.
        self._move_at = 2 * len(self._window)
