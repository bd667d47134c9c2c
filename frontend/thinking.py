"""Parts an output's text into thinking and answer, at the token where the engine says it ends.

Knows nothing of how thinking is bounded, of streams, or of stop strings.
"""

import dataclasses
from collections.abc import Callable, Sequence

from zipage_lang.runtime.think_params import ThinkParams


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkTexts:
    """The tags as they show in the text."""

    start: str
    end: str

    @classmethod
    def of(cls, params: ThinkParams, decode: Callable[[Sequence[int]], str]) -> "ThinkTexts":
        """decode: token ids to text, special tokens by name."""
        return cls(
            start=decode(params.start_token_ids) or params.start_text,
            end=decode(params.end_token_ids) or params.end_text,
        )

    def between(self, text: str) -> str:
        """What stands between the tags of a text that is all thinking; the rest is as it was."""
        unled = text.lstrip()
        if unled.startswith(self.start):
            text = unled[len(self.start) :]
        end = text.rfind(self.end)
        return text if end < 0 else text[:end]


class ThinkSplit:
    """Where in one output's text each token ends, so that it can be parted at any token."""

    def __init__(self, texts: ThinkTexts) -> None:
        self._texts = texts
        self._ends: list[int] = []  # characters up to and with each token

    def add(self, num_characters: int) -> None:
        """One more token, which added this many characters."""
        self._ends.append(num_characters + (self._ends[-1] if self._ends else 0))

    def part(self, text: str, num_thinking_tokens: int) -> tuple[str, str]:
        """(thinking without its tags, answer); `text` may lack what is still held back."""
        num_known = min(num_thinking_tokens, len(self._ends))
        end = self._ends[num_known - 1] if num_known else 0
        return self._texts.between(text[:end]), text[end:]
