"""A completion in OpenAI's form: one object, or chunks as it comes.

Knows nothing of HTTP or of how the answer is made.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.server.openai.chat_reply import stop_detail
from zipage_lang.server.openai.completion_call import CompletionCall
from zipage_lang.server.openai.completion_logprobs import CompletionLogprobs
from zipage_lang.server.openai.usage import UsageCount

Json = dict[str, Any]


def completion(call: CompletionCall, results: Sequence[Sequence[RequestOutput]]) -> Json:
    """The whole answer; choices count through the prompts, each with its samples."""
    usage = UsageCount()
    choices = []
    for prompt_index, outputs in enumerate(results):
        for output in outputs:
            usage.note(output, prompt_index)
            logprobs = call.new_logprobs(prompt_index)
            choices.append(_choice(call, prompt_index, output, logprobs, output.text))
            choices[-1]["text"] = call.echoes[prompt_index] + choices[-1]["text"]
    return {
        **_head(call),
        "choices": choices,
        "usage": usage.body(hides_output=call.hides_output),
    }


class CompletionChunks:
    """The chunks of one streamed answer: each of one choice, the usage last and alone."""

    def __init__(
        self, call: CompletionCall, *, tells_usage: bool, tells_usage_always: bool
    ) -> None:
        self._call = call
        self._head = _head(call)
        self._tells_usage, self._tells_usage_always = tells_usage, tells_usage_always
        self._usage = UsageCount()
        self._logprobs: dict[tuple[int, int], CompletionLogprobs | None] = {}

    async def events(self) -> AsyncGenerator[Json, None]:
        """All of them. Raises ApiError."""
        async with aclosing(self._call.outputs()) as outputs:
            async for prompt_index, output in outputs:
                self._usage.note(output, prompt_index)
                yield self._chunk(prompt_index, output)
        if self._tells_usage:
            yield {**self._head, "choices": [], "usage": self._told_usage()}

    def _chunk(self, prompt_index: int, output: RequestOutput) -> Json:
        place = (prompt_index, output.sample_index)
        lead = ""
        if place not in self._logprobs:
            self._logprobs[place] = self._call.new_logprobs(prompt_index)
            lead = self._call.echoes[prompt_index]
        choice = _choice(self._call, prompt_index, output, self._logprobs[place], output.text_delta)
        choice["text"] = lead + choice["text"]
        chunk: Json = {**self._head, "choices": [choice]}
        if self._tells_usage:
            chunk["usage"] = self._told_usage() if self._tells_usage_always else None
        return chunk

    def _told_usage(self) -> Json:
        return self._usage.body(hides_output=self._call.hides_output)


def _choice(
    call: CompletionCall,
    prompt_index: int,
    output: RequestOutput,
    logprobs: CompletionLogprobs | None,
    text: str,
) -> Json:
    hides = call.hides_output
    lists = None if logprobs is None else logprobs.feed(output, hides_output=hides)
    return {
        "index": prompt_index * call.num_samples + output.sample_index,
        "text": "" if hides else text,
        "logprobs": lists,
        "finish_reason": output.finish_reason,
        **(stop_detail(output) if output.is_final else {}),
    }


def _head(call: CompletionCall) -> Json:
    return {
        "id": call.request_id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "system_fingerprint": None,
    }
