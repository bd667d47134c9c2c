"""Collects what is to be told to clients: new tokens, ends, errors.

Knows nothing of sockets or text.
"""

from zipage_lang.runtime.messages import AddRequest, LogprobEntry, TokenOutput
from zipage_lang.runtime.request import Request
from zipage_lang.runtime.step_plan import TokenLogprobs


def logprob_entry(logprobs: TokenLogprobs) -> LogprobEntry:
    return LogprobEntry(logprobs.token_id, logprobs.logprob, logprobs.rank, list(logprobs.top))


class RequestOutputs:
    """Outputs since the last `take`, in order."""

    def __init__(self) -> None:
        self._items: list[TokenOutput] = []

    def take(self) -> list[TokenOutput]:
        items, self._items = self._items, []
        return items

    def has_end(self, request_id: str) -> bool:
        """Whether a sample's end waits to be taken."""
        return any(item.is_final for item in self._items if item.request_id == request_id)

    def tell_token(
        self,
        request: Request,
        logprobs: TokenLogprobs | None,
        finish_reason: str | None,
        stop_token_id: int | None,
    ) -> None:
        wants_prompt = (
            request.sampling.prompt_logprobs is not None
            and request.sample_index == 0
            and request.num_output_tokens == 1
        )
        self._items.append(
            TokenOutput(
                request_id=request.request_id,
                sample_index=request.sample_index,
                token_ids=[request.token_ids[-1]],
                logprobs=None if logprobs is None else [logprob_entry(logprobs)],
                prompt_logprobs=_prompt_entries(request) if wants_prompt else None,
                finish_reason=finish_reason,
                stop_token_id=stop_token_id,
                usage=request.usage(),
                kv=request.kv_usage(),
            )
        )

    def tell_end(self, request: Request, finish_reason: str) -> None:
        """An end that comes without a token: an abort, or a stop string the client saw."""
        self._items.append(
            TokenOutput(
                request_id=request.request_id,
                sample_index=request.sample_index,
                finish_reason=finish_reason,
                usage=request.usage(),
                kv=request.kv_usage(),
            )
        )

    def tell_failure(self, request: Request, error: str) -> None:
        """A sample that could not go on."""
        self._items.append(
            TokenOutput(
                request_id=request.request_id,
                sample_index=request.sample_index,
                error=error,
                usage=request.usage(),
                kv=request.kv_usage(),
            )
        )

    def tell_error(self, message: AddRequest, error: str) -> None:
        """A refused request: one final output per sample it asked for."""
        self._items.extend(
            TokenOutput(request_id=message.request_id, sample_index=index, error=error)
            for index in range(message.sampling.n)
        )

    def tell_abort(self, message: AddRequest) -> None:
        """A request that was aborted before anything was made of it."""
        self._items.extend(
            TokenOutput(request_id=message.request_id, sample_index=index, finish_reason="abort")
            for index in range(message.sampling.n)
        )


def _prompt_entries(request: Request) -> list[LogprobEntry | None]:
    """One entry per prompt token; None where nothing was asked for, and for the first."""
    entries = list(request.prompt_logprobs)
    return entries + [None] * (request.num_prompt_tokens - len(entries))
