"""A chat answer in OpenAI's form: one object, or chunks as it comes.

Knows nothing of HTTP or of how the answer is made.
"""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.server.openai.call_reader import CallPiece
from zipage_lang.server.openai.chat_call import ChatCall
from zipage_lang.server.openai.sample_reader import SampleReader, Told
from zipage_lang.server.openai.usage import UsageCount

Json = dict[str, Any]


def chat_completion(call: ChatCall, outputs: Sequence[RequestOutput]) -> Json:
    """The whole answer."""
    usage = UsageCount()
    for output in outputs:
        usage.note(output)
    return {
        **_head(call, "chat.completion"),
        "choices": [_choice(call, output) for output in outputs],
        "usage": usage.body(),
    }


def _choice(call: ChatCall, output: RequestOutput) -> Json:
    reader = call.new_reader()
    told = reader.feed(output)
    return {
        "index": output.sample_index,
        "message": _message(told),
        "logprobs": _logprobs(told.logprobs),
        **_ending(reader, output),
    }


def _message(told: Told) -> Json:
    content = "".join(piece for piece in told.pieces if isinstance(piece, str))
    calls = joined_calls(told.pieces)
    message: Json = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
        "reasoning_content": told.thought or None,
        "reasoning": told.thought or None,
    }
    if calls:
        message["tool_calls"] = [
            {"id": new_call_id(), "type": "function", "function": call} for call in calls
        ]
    return message


def joined_calls(pieces: Sequence[str | CallPiece]) -> list[Json]:
    """The calls among the pieces, each {"name", "arguments"}."""
    calls: dict[int, Json] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            call = calls.setdefault(piece.index, {"name": piece.name, "arguments": ""})
            call["arguments"] += piece.arguments
    return list(calls.values())


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatChunks:
    """The chunks of one streamed answer: each of one choice, the usage last and alone."""

    def __init__(self, call: ChatCall, *, tells_usage: bool, tells_usage_always: bool) -> None:
        self._call = call
        self._head = _head(call, "chat.completion.chunk")
        self._tells_usage, self._tells_usage_always = tells_usage, tells_usage_always
        self._usage = UsageCount()
        self._readers: dict[int, SampleReader] = {}
        self._logprobs: dict[int, list[Json]] = {}  # of tokens whose text is still held back

    async def events(self) -> AsyncGenerator[Json, None]:
        """All of them. Raises ApiError."""
        async with aclosing(self._call.outputs()) as outputs:
            async for output in outputs:
                self._usage.note(output)
                for chunk in self._chunks(output):
                    yield chunk
        if self._tells_usage:
            yield {**self._head, "choices": [], "usage": self._usage.body()}

    def _chunks(self, output: RequestOutput) -> list[Json]:
        index = output.sample_index
        reader = self._readers.get(index)
        chunks = []
        if reader is None:
            reader = self._readers[index] = self._call.new_reader()
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
        told = reader.feed(output)
        if told.logprobs:
            self._logprobs.setdefault(index, []).extend(told.logprobs)
        chunks += [self._chunk(index, delta) for delta in _deltas(told)]
        if output.is_final:
            chunks.append(self._chunk(index, {}, _ending(reader, output)))
        return chunks

    def _chunk(self, index: int, delta: Json, ending: Json | None = None) -> Json:
        is_told_apart = "role" in delta or "reasoning" in delta
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if is_told_apart else _logprobs(self._logprobs.pop(index, None)),
            "finish_reason": None,
            **(ending or {}),
        }
        chunk = {**self._head, "choices": [choice]}
        if self._tells_usage:
            chunk["usage"] = self._usage.body() if self._tells_usage_always else None
        return chunk


def _deltas(told: Told) -> list[Json]:
    """What a sample's news are in chunks: thought, text, and each call's pieces."""
    deltas: list[Json] = []
    if told.thought:
        deltas.append({"reasoning_content": told.thought, "reasoning": told.thought})
    for piece in told.pieces:
        if isinstance(piece, CallPiece):
            _add_call(deltas, piece)
        elif deltas and "content" in deltas[-1]:
            deltas[-1]["content"] += piece
        else:
            deltas.append({"content": piece})
    return deltas


def _add_call(deltas: list[Json], piece: CallPiece) -> None:
    """A call's name opens its entry; arguments that come in one go are one delta."""
    last = deltas[-1]["tool_calls"][0] if deltas and "tool_calls" in deltas[-1] else None
    if piece.name is None and last is not None and last["index"] == piece.index:
        last["function"]["arguments"] += piece.arguments
        return
    call: Json = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.name is not None:
        call |= {"id": new_call_id(), "type": "function"}
        call["function"]["name"] = piece.name
    deltas.append({"tool_calls": [call]})


def _head(call: ChatCall, kind: str) -> Json:
    return {
        "id": call.request_id,
        "object": kind,
        "created": call.created,
        "model": call.model,
        "system_fingerprint": None,
    }


def _ending(reader: SampleReader, output: RequestOutput) -> Json:
    return {"finish_reason": reader.finish_reason(output), **stop_detail(output)}


def stop_detail(output: RequestOutput) -> Json:
    """Which stop string or token it was, under the names that vLLM and SGLang have for it."""
    return {"stop_reason": output.stop_reason, "matched_stop": output.stop_reason}


def _logprobs(entries: list[Json] | None) -> Json | None:
    return None if entries is None else {"content": entries, "refusal": None}
