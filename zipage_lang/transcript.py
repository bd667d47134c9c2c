"""What a state has said so far, as token ids: the truth that every request's prompt is cut from.

The author's text waits in a buffer and becomes tokens as one piece when a request needs it;
generated tokens stay exactly as they were generated. So each prompt extends the tokens of the
request before it, and the radix tree finds them again.
Knows nothing of requests, chat roles or loops.
"""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The part of a backend that turns text into token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Transcript:
    """Token ids, the author's text not yet among them, and the whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._pending = ""
        self._pieces: list[str] = []
        self._opened_by_template: bool | None = None
        self._authored_len: int | None = None  # tokens before the first generated one
        self._kept_len = 0  # tokens up to the end of the last kept text

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def authored_len(self) -> int:
        """Tokens the author wrote before the first generated one; all while there is none."""
        return len(self._token_ids) if self._authored_len is None else self._authored_len

    @property
    def kept_len(self) -> int:
        """Tokens up to the end of the last text that must never be compacted; 0 without one."""
        return self._kept_len

    def write(self, text: str) -> None:
        """Append the author's text."""
        self._append(text, of_template=False)

    def write_template(self, text: str) -> None:
        """Append what the chat template puts around a message; it brings its own special tokens."""
        self._append(text, of_template=True)

    def settle(self) -> list[int]:
        """Turn the buffered text into tokens; returns a copy of all token ids."""
        if self._pending:
            opens_plain = not self._token_ids and not self._opened_by_template
            self._token_ids += self._tokenizer.encode(self._pending, add_special_tokens=opens_plain)
            self._pending = ""
        return list(self._token_ids)

    def keep(self) -> None:
        """All text so far must stay. Its end becomes a border between tokens."""
        self._kept_len = len(self.settle())

    def cut_end(self, mark: str, floor: int) -> None:
        """Take back `mark` and the space behind it where the text ends in them, and only if they
        are whole tokens behind the first `floor`.
        """
        text = self.text
        rest = text.rstrip().removesuffix(mark)
        if self._pending or rest == text.rstrip():
            return
        ending = text[len(rest) :]
        for start in range(len(self._token_ids) - 1, floor - 1, -1):
            tail = self._tokenizer.decode(self._token_ids[start:], skip_special_tokens=False)
            if tail == ending:
                del self._token_ids[start:]
                self._pieces = [rest]
                self._kept_len = min(self._kept_len, start)
            if len(tail) >= len(ending):
                return

    def add_generated(self, token_ids: Sequence[int], text: str, unfinished: str) -> None:
        """Append generated tokens as they are.

        `text` is all that was generated; `unfinished` is its end, where a stop string cut through a
        token: it waits in front of the text that the author writes next.
        """
        assert not self._pending, f"{len(self._pending)} characters were not in the prompt"
        if self._authored_len is None:
            self._authored_len = len(self._token_ids)
        self._token_ids += token_ids
        self._pending = unfinished
        self._pieces.append(text)

    def add_chosen(self, token_ids: Sequence[int], text: str) -> None:
        """Append one of the author's choices by the tokens it was scored with."""
        assert not self._pending, f"{len(self._pending)} characters were not in the prompt"
        self._token_ids += token_ids
        self._pieces.append(text)

    def copy(self) -> "Transcript":
        """A transcript of its own that shares the exact tokens so far."""
        self.settle()
        twin = Transcript(self._tokenizer)
        twin._token_ids = list(self._token_ids)
        twin._pieces = [self.text]
        twin._opened_by_template = self._opened_by_template
        twin._authored_len = self._authored_len
        twin._kept_len = self._kept_len
        return twin

    def append_from(self, other: "Transcript", start: "ForkPoint") -> None:
        """Append what `other` says after `start`, token by token."""
        self.settle()
        if self._authored_len is None and other._authored_len is not None:
            authored_after = max(0, other._authored_len - start.num_tokens)
            self._authored_len = len(self._token_ids) + authored_after
        if other._kept_len > start.num_tokens:
            self._kept_len = len(self._token_ids) + other._kept_len - start.num_tokens
        self._token_ids += other._token_ids[start.num_tokens :]
        self._pending = other._pending
        self._pieces.append(other.text[start.num_characters :])
        self._opened_by_template = bool(self._opened_by_template or other._opened_by_template)

    def fork_point(self) -> "ForkPoint":
        return ForkPoint(len(self.settle()), len(self.text))

    def _append(self, text: str, *, of_template: bool) -> None:
        if not text:
            return
        if self._opened_by_template is None:
            self._opened_by_template = of_template
        self._pending += text
        self._pieces.append(text)


class ForkPoint:
    """How long a transcript was when it was copied."""

    def __init__(self, num_tokens: int, num_characters: int) -> None:
        self.num_tokens = num_tokens
        self.num_characters = num_characters


def split_at_cut(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, *, skip_special_tokens: bool
) -> tuple[list[int], str]:
    """The generated tokens that lie wholly before the end of `text`, and the rest of `text`.

    `text` is what a stop string left of the tokens' text; the string may begin inside a token.
    """
    for num_kept in range(len(token_ids), 0, -1):
        kept = list(token_ids[:num_kept])
        head = tokenizer.decode(kept, skip_special_tokens=skip_special_tokens)
        if text.startswith(head):
            return kept, text[len(head) :]
    return [], text
