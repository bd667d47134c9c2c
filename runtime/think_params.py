"""How one request may think before it answers: cap, floor, tags, and how thinking is closed.

Knows nothing of tokens' bytes, of grammars, or of how thinking is watched.
"""

import dataclasses
from typing import Any

from zipage_lang.runtime.documented import documented
from zipage_lang.runtime.strict_fields import strict_fields

MAX_TAG_LEN = 256  # characters
MAX_COUNT = 2**31 - 1


@strict_fields("think field")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ThinkParams:
    """Thinking control of one request.

    Parameters: the fields below. Errors: ValueError (value and fix named) for a field out of range.

    Tags are given as text, or as token ids where the text does not say which tokens are meant. They
    are found by their text, however the model spells it in tokens.

    >>> from zipage_lang.runtime.sampling_params import SamplingParams
    >>> SamplingParams(think=ThinkParams(max_tokens=512, min_tokens=16)).think.closing
    '\\n</think>\\n\\n'
    """

    max_tokens: int | None = documented(
        None, "tokens between the tags at most; then `closing` is forced"
    )
    min_tokens: int = documented(
        0, "before this many, thinking can't end, and no end-of-sequence is drawn"
    )
    start_text: str = documented("<think>", "the tag that opens thinking")
    end_text: str = documented("</think>", "the tag that ends it")
    start_token_ids: tuple[int, ...] = documented((), "instead of start_text")
    end_token_ids: tuple[int, ...] = documented((), "instead of end_text")
    closing_text: str | None = documented(
        None, "forced at the cap; None: the end tag on a line of its own"
    )
    starts_inside: bool = documented(False, "the prompt ends with the start tag already")
    tool_starts: tuple[str, ...] = documented(
        ("<tool_call>",), "end thinking too; they belong to the answer"
    )

    def __post_init__(self) -> None:
        for name in ("start_token_ids", "end_token_ids", "tool_starts"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{name}={value!r} must be a list")
            object.__setattr__(self, name, tuple(value))
        if self.max_tokens is not None:
            _count("max_tokens", self.max_tokens)
        _count("min_tokens", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"think min_tokens={self.min_tokens} is above its max_tokens={self.max_tokens}; "
                "lower it"
            )
        for name, ids in (("start", self.start_token_ids), ("end", self.end_token_ids)):
            for token_id in ids:
                _count(f"{name}_token_ids", token_id)
        for text in (self.start_text, self.end_text, *self.tool_starts):
            _tag(text)
        self._check_flags()

    @property
    def closing(self) -> str:
        """The text forced at the cap, where the end tag is given as text."""
        return f"\n{self.end_text}\n\n" if self.closing_text is None else self.closing_text

    def _check_flags(self) -> None:
        if not isinstance(self.starts_inside, bool):
            raise ValueError(f"starts_inside={self.starts_inside!r} must be True or False")
        closing = self.closing_text
        if closing is None:
            return
        if not isinstance(closing, str) or len(closing) > 16 * MAX_TAG_LEN:
            raise ValueError(
                f"closing_text={closing!r:.80} must be a text of at most {16 * MAX_TAG_LEN} "
                "characters"
            )
        if not self.end_token_ids and closing.count(self.end_text) != 1:
            raise ValueError(
                f"closing_text={closing!r:.80} must hold the end tag {self.end_text!r} once"
            )


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"think {name}={value!r} must be a whole number from 0 to {MAX_COUNT}")


def _tag(text: Any) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TAG_LEN or text != text.strip():
        raise ValueError(
            f"think tag {text!r:.80} must be a text of 1 to {MAX_TAG_LEN} characters without "
            "whitespace around it"
        )
