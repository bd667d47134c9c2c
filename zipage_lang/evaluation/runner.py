"""What a sweep asks of an engine: token ids in, whole outputs back, as they finish.

Two stand behind it: an engine process (`process_runner.py`) and one in this process
(`inprocess_runner.py`). Knows nothing of problems, text or files.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from zipage_lang.frontend.errors import ZipageError
from zipage_lang.frontend.tokenizer import Tokenizer
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, KVUsage, LogprobEntry, Ready, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams

WAITING_PER_ROW = 1  # requests sent ahead per row, so that no row waits for the harness


class EvaluationError(ZipageError):
    """The engine refused or failed a request, so the sweep can't go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One prompt; `sampling.n` outputs come back for it."""

    key: Any  # comes back with each output
    token_ids: list[int]
    sampling: SamplingParams
    kv: KVParams

    def request(self, request_id: str) -> AddRequest:
        return AddRequest(
            request_id=request_id, token_ids=self.token_ids, sampling=self.sampling, kv=self.kv
        )


@dataclasses.dataclass(slots=True)
class Output:
    """One sample, whole once `finish_reason` is set."""

    key: Any
    sample_index: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    kv: KVUsage = dataclasses.field(default_factory=KVUsage)
    prompt_logprobs: list[LogprobEntry | None] | None = None

    def feed(self, output: TokenOutput) -> None:
        """Take what the engine sent. Raises EvaluationError where it is an error."""
        self.token_ids += output.token_ids
        if output.is_final or output.prompt_logprobs is not None:
            self._take_rest(output)

    def _take_rest(self, output: TokenOutput) -> None:
        if output.error is not None:
            raise EvaluationError(f"the engine ended a request: {output.error}")
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_token_id = output.stop_token_id
        self.kv = output.kv

    @property
    def text_token_ids(self) -> list[int]:
        """Without the token that ended it."""
        if self.stop_token_id is not None and self.token_ids[-1] == self.stop_token_id:
            return self.token_ids[:-1]
        return self.token_ids


class Runner(Protocol):
    """An engine at the harness's service."""

    tokenizer: Tokenizer
    max_running: int
    num_tokens: int  # drawn so far, for progress

    @property
    def ready(self) -> Ready:
        """What the engine said of itself."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Output]:
        """Outputs in the order they finish. Jobs are taken as rows come free, not all at once.

        Leaving the iterator early aborts what runs. Raises EvaluationError.
        """

    def stats(self) -> dict[str, int | float | str]:
        """The engine's counters."""

    def flush_cache(self) -> None:
        """Forget what no request holds, and count the peak anew."""

    def close(self) -> None:
        """End the engine."""
