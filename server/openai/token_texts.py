"""What single tokens say: their text, their bytes, and where they stand in the whole text.

Knows nothing of log-probabilities or of wire formats.
"""

import re
from collections.abc import Sequence

from zipage_lang.frontend.detokenizer import ByteDetokenizer
from zipage_lang.frontend.tokenizer import Tokenizer

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
WORD_START = "\u2581"  # how SentencePiece vocabularies write a space


class TokenTexts:
    """The pieces of one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.new_detokenizer(), ByteDetokenizer)

    def data(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special one, its name's."""
        data = self._tokenizer.token_bytes(token_id)
        if self._is_byte_level:
            return data
        name = data.decode("utf-8", "replace")
        byte = _BYTE_NAME.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace(WORD_START, " ").encode()

    def text(self, token_id: int) -> str:
        """As text; bytes that are no text alone become U+FFFD."""
        return self.data(token_id).decode("utf-8", "replace")

    def name(self, token_id: int) -> str:
        """As text that is another one for other bytes, in OpenAI's older way."""
        data = self.data(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenSpans:
    """Where each token of one text begins and ends, in characters, as the tokens come in."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._detokenizer = tokenizer.new_detokenizer(skip_special_tokens)
        self._len = 0

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """All tokens so far; those not seen before are added."""
        for token_id in token_ids[len(self.starts) :]:
            self.starts.append(self._len)
            self._len += len(self._detokenizer.feed([token_id]))
            self.ends.append(self._len)
