"""Who answers in a chat: an engine of this process, or any server that speaks OpenAI's chat.

Knows nothing of terminals, commands or the history.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from zipage_lang.errors import ServerError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.http_client import HttpClient, checked
from zipage_lang.loops import LoopBridge, shared_loop
from zipage_lang.openai_wire import Choice, Chunk, Delta, TokenCounts, request_fields
from zipage_lang.runtime.messages import KVUsage
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

if TYPE_CHECKING:
    from zipage_lang.frontend.llm import Engine
    from zipage_lang.frontend.tokenizer import Tokenizer

Message = Mapping[str, str]
THINK_TAG = ThinkParams().start_text


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What came: new text, and how the answer stands."""

    thinking: str = ""
    answer: str = ""
    num_tokens: int = 0  # so far; 0 where the server has not said
    kv: KVUsage | None = None
    finish_reason: str | None = None


class Talker(Protocol):
    """Answers a conversation. Leaving the iterator early stops the answer."""

    name: str

    def reply(self, messages: Sequence[Message]) -> Generator[Piece, None, None]: ...


class EngineTalker:
    """An engine of this process."""

    def __init__(
        self, engine: "Engine", name: str, sampling: SamplingParams, think_len: int | None
    ) -> None:
        """think_len: tokens of thinking at most; None: no cap."""
        self.name = name
        self._engine = engine
        self._sampling = sampling
        self._think_len = think_len

    def reply(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Raises ValueError where the conversation is too long or the template refuses it."""
        tokenizer = self._engine.async_llm.tokenizer
        prompt = tokenizer.render_chat(messages)
        think = self._think(tokenizer, prompt)
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        sampling = self._sampling if think is None else self._sampling.replace(think=think)
        thinking = answer = ""
        with contextlib.closing(self._engine.stream(token_ids, sampling)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                piece = _piece(output, thinking, answer)
                thinking, answer = thinking + piece.thinking, answer + piece.answer
                yield piece

    def _think(self, tokenizer: "Tokenizer", prompt: str) -> ThinkParams | None:
        """Thinking is watched where the model has a tag for it."""
        starts_inside = prompt.rstrip().endswith(THINK_TAG)
        if not starts_inside and tokenizer.token_id(THINK_TAG) is None:
            return None
        return ThinkParams(max_tokens=self._think_len, starts_inside=starts_inside)


class ServerTalker:
    """A server over HTTP; ours says how its KV cache stands, others do not."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        model: str | None,
        sampling: SamplingParams,
        think_len: int | None,
    ) -> None:
        """Raises ServerError where nobody answers, ValueError for a bad url."""
        root = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(root, api_key=api_key, timeout_s=600.0)
        cards = checked(self._http.get_blocking("/v1/models").get("data"), list[_Card])
        known = [card.id for card in cards]
        if not known:
            raise ServerError(f"{root} serves no model", None, retryable=False)
        if model is not None and model not in known:
            raise ValueError(f"{root} serves {', '.join(known)}, not {model!r}")
        self.name = model or known[0]
        self._fields = {**request_fields(sampling, chat=True), "model": self.name}
        if think_len is not None:
            self._fields["thinking_token_budget"] = think_len

    def reply(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Raises ServerError or ValueError, mid-stream too."""
        body = {
            **self._fields,
            "messages": [dict(message) for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        events = self._http.events("/v1/chat/completions", body)
        yield from (_of_chunk(event) for event in LoopBridge(shared_loop()).iterate(events))


def _piece(output: RequestOutput, thinking: str, answer: str) -> Piece:
    """What an output adds to what was told; a text that was parted otherwise so far is kept."""
    return Piece(
        thinking=_added(output.thinking, thinking),
        answer=_added(output.answer, answer),
        num_tokens=len(output.token_ids),
        kv=output.kv,
        finish_reason=output.finish_reason,
    )


def _added(text: str, told: str) -> str:
    return text[len(told) :] if text.startswith(told) else ""


class _Card(msgspec.Struct):
    id: str


def _of_chunk(event: Mapping[str, Any]) -> Piece:
    """Raises ServerError for what is no chunk."""
    chunk = checked(event, Chunk)
    choice = chunk.choices[0] if chunk.choices else Choice()
    delta = choice.delta or Delta()
    usage = chunk.usage or TokenCounts()
    return Piece(
        thinking=delta.reasoning_content or delta.reasoning or "",
        answer=delta.content or "",
        num_tokens=usage.completion_tokens or 0,
        kv=chunk.kv or usage.kv,
        finish_reason=choice.finish_reason,
    )
