"""Log-probabilities in the form of /v1/completions: parallel lists, the prompt's first with echo.

Knows nothing of chunks or of requests.
"""

from collections.abc import Sequence
from typing import Any

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.frontend.tokenizer import Tokenizer
from zipage_lang.runtime.messages import LogprobEntry
from zipage_lang.server.openai.chat_logprobs import LOWEST
from zipage_lang.server.openai.token_texts import TokenSpans, TokenTexts

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Lists = dict[str, list[Any]]


class CompletionLogprobs:
    """One sample's. Every token has its line, the one that ended the output too."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, echoed: Sequence[int] = ()
    ) -> None:
        """echoed: the prompt's tokens, where the text begins with them."""
        self._texts = TokenTexts(tokenizer)
        self._spans = TokenSpans(tokenizer, skip_special_tokens=skip_special_tokens)
        self._echoed = list(echoed)
        self._num_told = 0  # lines

    def feed(self, output: RequestOutput, *, hides_output: bool = False) -> Lists:
        """The lines that are new."""
        drawn = [] if hides_output else output.token_ids
        ids = [*self._echoed, *drawn]
        self._spans.extend_to(ids)
        entries: list[LogprobEntry | None] = [None] * len(self._echoed)
        for place, entry in enumerate((output.prompt_logprobs or ())[: len(entries)]):
            entries[place] = entry
        entries += (output.logprobs or [])[: len(drawn)]
        lists: Lists = {name: [] for name in LISTS}
        for place in range(self._num_told, len(entries)):
            self._add(lists, ids[place], entries[place], self._spans.starts[place])
        self._num_told = len(entries)
        return lists

    def _add(self, lists: Lists, token_id: int, entry: LogprobEntry | None, offset: int) -> None:
        lists["tokens"].append(self._texts.name(token_id))
        lists["token_logprobs"].append(None if entry is None else max(entry.logprob, LOWEST))
        lists["top_logprobs"].append(None if entry is None else self._top(entry))
        lists["text_offset"].append(offset)

    def _top(self, entry: LogprobEntry) -> dict[str, float]:
        """Of tokens that read alike the likeliest stands; the drawn one is always there."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            name = self._texts.name(token_id)
            top[name] = max(logprob, LOWEST, top.get(name, LOWEST))
        return top
