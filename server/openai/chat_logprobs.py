"""Log-probabilities of a chat answer's tokens, in step with the text that is told.

Knows nothing of tool calls or of how chunks are made.
"""

from typing import Any

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.frontend.tokenizer import Tokenizer
from zipage_lang.runtime.messages import LogprobEntry
from zipage_lang.server.openai.thought_feed import ThoughtFeed
from zipage_lang.server.openai.token_texts import TokenSpans, TokenTexts

LOWEST = -9999.0  # stands for minus infinity, which JSON can't say


class ChatLogprobs:
    """One sample's. Covers the answer: neither thinking, nor a stop string, nor the end token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._texts = TokenTexts(tokenizer)
        self._spans = TokenSpans(tokenizer, skip_special_tokens=skip_special_tokens)
        self._num_told = 0

    def feed(self, output: RequestOutput, thoughts: ThoughtFeed) -> list[dict[str, Any]]:
        """Entries of the tokens whose text has begun to show since the last output."""
        self._spans.extend_to(output.token_ids)
        if not thoughts.is_answering or output.logprobs is None:
            return []
        entries = []
        while self._num_told < len(output.logprobs):
            place = self._num_told
            if self._spans.starts[place] >= len(output.text):
                break
            self._num_told += 1
            if self._is_answer(place, output, thoughts):
                entries.append(self._entry(output.logprobs[place]))
        return entries

    def _is_answer(self, place: int, output: RequestOutput, thoughts: ThoughtFeed) -> bool:
        if not output.num_thinking_tokens:
            return True
        is_thought = place < output.num_thinking_tokens
        return not is_thought and self._spans.ends[place] > thoughts.answer_start

    def _entry(self, entry: LogprobEntry) -> dict[str, Any]:
        top = [self._told(token_id, logprob) for token_id, logprob in entry.top]
        return self._told(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _told(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._texts.data(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, LOWEST),
            "bytes": list(data),
        }
