"""Counts tokens over all samples of a call, as OpenAI's clients read them.

Knows nothing of routes or chunks.
"""

from typing import Any

from zipage_lang.frontend.outputs import RequestOutput

KV_COUNTS = ("logical_len", "resident_len", "max_resident_len", "compactions", "dropped")


class UsageCount:
    """The latest output of each sample, counted. A prompt counts once, however many samples."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], RequestOutput] = {}

    def note(self, output: RequestOutput, prompt_index: int = 0) -> None:
        self._latest[prompt_index, output.sample_index] = output

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self._first_samples())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed anew, of those counted."""
        return sum(output.usage.cached_tokens for output in self._first_samples())

    @property
    def completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._latest.values())

    @property
    def reasoning_tokens(self) -> int:
        return sum(output.usage.thinking_tokens for output in self._latest.values())

    def kv(self) -> dict[str, int]:
        """Slots per layer and KV head, over all samples: ours, not OpenAI's."""
        kvs = [output.kv for output in self._latest.values()]
        return {name: sum(getattr(kv, name) for kv in kvs) for name in KV_COUNTS}

    def body(self, *, hides_output: bool = False) -> dict[str, Any]:
        """The `usage` object. hides_output: the one token that had to be drawn was not wanted."""
        completion = 0 if hides_output else self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "kv": self.kv(),
        }

    def _first_samples(self) -> list[RequestOutput]:
        """One sample of each prompt: the one that computed it, once it has been told of."""
        firsts: dict[int, RequestOutput] = {}
        for (prompt_index, sample_index), output in sorted(self._latest.items(), key=_place):
            if prompt_index not in firsts or sample_index == 0:
                firsts[prompt_index] = output
        return list(firsts.values())


def _place(item: tuple[tuple[int, int], RequestOutput]) -> tuple[int, int]:
    return item[0]
