"""Turns one sample's new tokens into text and RequestOutputs: detokenise, find stop strings, count.

Knows nothing of sockets, other samples or who reads the result.
"""

import msgspec

from zipage_lang.frontend.detokenizer import Detokenizer
from zipage_lang.frontend.outputs import FINISH_STOP, RequestOutput
from zipage_lang.frontend.stop_strings import StopMatcher
from zipage_lang.frontend.thinking import ThinkSplit
from zipage_lang.runtime.messages import KVUsage, LogprobEntry, TokenOutput, Usage


class SampleBuilder:
    """One sample of one request, from its first token to its last."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sample_index: int,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        split: ThinkSplit | None = None,
    ) -> None:
        """matcher: None without stop strings; split: None without thinking control."""
        self.prompt_logprobs: list[LogprobEntry | None] | None = None
        self.num_tokens = 0
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._sample_index = sample_index
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._split = split
        self._text = ""
        self._text_delta = ""
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobEntry] | None = None
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._usage = Usage()
        self._kv = KVUsage()

    @property
    def hit_stop_string(self) -> bool:
        """True once a stop string was found: what the engine sends beyond is not looked at."""
        return self._matcher is not None and self._matcher.matched is not None

    @property
    def is_final(self) -> bool:
        return self._finish_reason is not None

    def feed(self, output: TokenOutput) -> None:
        """Take what the engine sent for this sample; the text it adds becomes the new delta."""
        self._usage, self._kv = output.usage, output.kv
        num_before = self.num_tokens
        text = "" if self.hit_stop_string else self._read_tokens(output)
        self._add_logprobs(output, self.num_tokens - num_before)
        if output.finish_reason is not None:
            text += self._finish(output)
        self._text_delta = text
        self._text += text

    def snapshot(self) -> RequestOutput:
        """The sample as it stands."""
        thinking, answer = "", self._text
        if self._split is not None:
            thinking, answer = self._split.part(self._text, self._usage.thinking_tokens)
        return RequestOutput(
            request_id=self._request_id,
            prompt_token_ids=self._prompt_token_ids,
            sample_index=self._sample_index,
            text=self._text,
            text_delta=self._text_delta,
            thinking=thinking,
            answer=answer,
            token_ids=list(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            usage=self._usage,
            kv=self._kv,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            prompt_logprobs=self.prompt_logprobs,
        )

    def _read_tokens(self, output: TokenOutput) -> str:
        """Text of the new tokens, up to a stop string. The token that ended the output has none."""
        num_shown = len(output.token_ids)
        if num_shown and output.token_ids[-1] == output.stop_token_id:
            num_shown -= 1
        text = self._read_shown(output.token_ids[:num_shown])
        if not self.hit_stop_string:
            self._take(output.token_ids[num_shown:])
        return text

    def _read_shown(self, token_ids: list[int]) -> str:
        if self._matcher is None and self._split is None:
            self._take(token_ids)
            return self._detokenizer.feed(token_ids)
        shown = []
        for token_id in token_ids:  # one by one, so that the count at a match is exact
            self._take([token_id])
            text = self._detokenizer.feed([token_id])
            if self._split is not None:
                self._split.add(len(text))
            shown.append(self._match(text))
            if self.hit_stop_string:
                break
        return "".join(shown)

    def _match(self, text: str) -> str:
        """What of one token's text can be shown now. Thinking is not searched for stop strings."""
        if self._matcher is None:
            return text
        if self.num_tokens <= self._usage.thinking_tokens:
            return self._matcher.flush() + text
        return self._matcher.feed(text, self.num_tokens)

    def _take(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)

    def _add_logprobs(self, output: TokenOutput, num_taken: int) -> None:
        if output.logprobs is not None:
            self._logprobs = (self._logprobs or []) + output.logprobs[:num_taken]

    def _finish(self, output: TokenOutput) -> str:
        """Settle why it ended; return the text that was still held back."""
        text = "" if self.hit_stop_string else self._flush()
        self._finish_reason, self._stop_reason = output.finish_reason, output.stop_token_id
        if self._matcher is not None and self._matcher.matched is not None:
            self._finish_reason, self._stop_reason = FINISH_STOP, self._matcher.matched
            self._usage = msgspec.structs.replace(self._usage, completion_tokens=self.num_tokens)
        return text

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        shown = self._matcher.feed(rest, self.num_tokens)
        return shown if self._matcher.matched is not None else shown + self._matcher.flush()
