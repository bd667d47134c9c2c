"""What a caller gets for one sample: text, tokens, why it ended, and what it cost.

Knows nothing of how the text was made or where the tokens came from.
"""

import dataclasses

from zipage_lang.runtime.messages import KVUsage, LogprobEntry, Usage

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One sample as it stands; in a stream each one replaces the last and adds `text_delta`.

    Cumulative: text, token_ids, logprobs, usage, kv. `token_ids` holds the token that ended the
    output (end of sequence or a stop token) and those of a matched stop string; `text` does not.

    With thinking control `text` stays whole, and `thinking` and `answer` are its two parts:
    the first `num_thinking_tokens` tokens without their tags, and the rest as it is.
    """

    request_id: str
    prompt_token_ids: list[int]
    sample_index: int = 0
    text: str = ""
    text_delta: str = ""  # new since the last output of this sample
    thinking: str = ""  # between the tags; "" without thinking control
    answer: str = ""  # behind thinking; all of `text` without thinking control
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort; None while it runs
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    usage: Usage = dataclasses.field(default_factory=Usage)
    kv: KVUsage = dataclasses.field(default_factory=KVUsage)
    logprobs: list[LogprobEntry] | None = None  # one per token of token_ids, if asked for
    prompt_logprobs: list[LogprobEntry | None] | None = None  # one per prompt token, if asked for

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_thinking_tokens(self) -> int:
        """Leading tokens of `token_ids` that are thinking, tags and forced closing included."""
        return self.usage.thinking_tokens


@dataclasses.dataclass(slots=True)
class Progress:
    """How far a call has come; counted up while it runs."""

    num_samples: int
    num_finished: int = 0
    num_tokens: int = 0  # generated so far, over all samples

    def count(self, num_new_tokens: int, has_finished: bool) -> None:
        self.num_tokens += num_new_tokens
        self.num_finished += has_finished
