"""A backend that answers from a script, for testing programs without a model or an engine.

    backend = ScriptedBackend({"2+2=": "4", re.compile("capital"): RuntimeError("no")})
    state = program.run(backend=backend)
    backend.calls[0].prompt

Knows nothing of the interpreter.
"""

import asyncio
import dataclasses
import importlib
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.loops import shared_loop
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import KVUsage, LogprobEntry, Usage
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.script_ends import cut_at_stop, end_of, render_chatml, split_thinking
from zipage_lang.script_tokenizers import (
    EOS_TOKEN_ID,
    SPECIALS,
    ByteTokenizer,
    ScriptTokenizer,
    WordTokenizer,
)

if TYPE_CHECKING:
    from zipage_lang.grammar_match import match
    from zipage_lang.scripted_states import StatefulBackend

__all__ = [
    "ByteTokenizer",
    "Call",
    "Reply",
    "ScriptedBackend",
    "StatefulBackend",
    "WordTokenizer",
    "match",
    "render_chatml",
]


@dataclasses.dataclass(frozen=True)
class Call:
    """One sample that was asked for, as it stands in `ScriptedBackend.calls`.

    Parameters: the prompt as text and as token ids, and what came with it; of n samples each is a
    call. Errors: none.

    >>> backend = zipage.testing.ScriptedBackend("4")
    >>> state = zipage.function(lambda s: s.append("2+2=" + zipage.gen("a"))).run(backend=backend)
    >>> backend.calls[0].prompt
    '2+2='
    """

    prompt: str
    token_ids: list[int]
    sampling: SamplingParams
    kv: KVParams
    group_id: str
    sample_index: int = 0


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a call gets: `text`, token by token, then the end of sequence or an error.

    Parameters:
        text: what is generated.
        error: raised behind the last token.
        gate: holds the first token back until this future is done.
        token_delay_s: goes before each token.

    Errors: none.

    >>> reply = zipage.testing.Reply("2 and", error=RuntimeError("cut off"))
    >>> zipage.function(lambda s: s.append(zipage.gen("a"))).run(
    ...     backend=zipage.testing.ScriptedBackend(reply)).error()
    RuntimeError('cut off')
    """

    text: str
    error: Exception | None = None
    gate: "Future[Any] | None" = None
    token_delay_s: float = 0.0


class ScriptedBackend:
    """A Backend whose replies are given.

    What was asked for stands in `calls`.

    Parameters:
        script: a string, a Reply or an exception for every call; a list of them, used in the order
            of the calls; a mapping from prompt endings (strings) or patterns searched in the prompt
            to any of these; or a function of the Call.
        tokenizer: a ByteTokenizer unless given.
        token_logprob: a function of (context, token) that answers for the logprobs of prompts,
            choices and drawn tokens.
        render: a chat template, as a function of (messages, add_generation_prompt).

    Errors: AssertionError, where the value is read, for a call that the script has no reply for.

    >>> backend = zipage.testing.ScriptedBackend({"2+2=": "4", "3+3=": ValueError("no")})
    >>> zipage.function(lambda s: s.append("2+2=" + zipage.gen("a"))).run(backend=backend)["a"]
    '4'
    """

    def __init__(
        self,
        script: Any = "",
        *,
        tokenizer: ScriptTokenizer | None = None,
        token_logprob: Callable[[str, str], float] = lambda context, token: -1.0,
        render: Callable[[Sequence[Mapping[str, str]], bool], str] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.aborted_groups: list[str] = []
        self.num_running = 0
        self.max_running = 0
        self._script = script
        self._tokenizer = tokenizer or ByteTokenizer()
        self._token_logprob = token_logprob
        self._render = render or render_chatml
        self._num_listed: dict[int, int] = {}  # replies taken from each list of the script

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return shared_loop()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({EOS_TOKEN_ID})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        kept = [i for i in token_ids if i >= len(SPECIALS) or not skip_special_tokens]
        return b"".join(self._tokenizer.spell(i) for i in kept).decode("utf-8", "replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        return self._render(messages, add_generation_prompt)

    async def abort(self, group_id: str) -> None:
        self.aborted_groups.append(group_id)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv: KVParams,
        group_id: str,
    ) -> AsyncGenerator[RequestOutput]:
        """All samples side by side, one token of each in turn."""
        prompt = self.decode(token_ids, skip_special_tokens=False)
        calls = [
            Call(prompt, list(token_ids), sampling, kv, group_id, index)
            for index in range(sampling.n)
        ]
        self.calls += calls
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            samples = [self._sample(call, self._reply(self._script, call)) for call in calls]
            while samples:
                for sample in list(samples):
                    output = await anext(sample)
                    yield output
                    if output.is_final:
                        samples.remove(sample)
        finally:
            self.num_running -= 1

    def _reply(self, script: Any, call: Call) -> Reply:
        match script:
            case Reply():
                return script
            case str():
                return Reply(script)
            case Exception():
                return Reply("", error=script)
            case Mapping():
                return self._reply(_matching(script, call.prompt), call)
            case list():
                taken = self._num_listed.get(id(script), 0)
                assert taken < len(script), f"the script has no reply number {taken}"
                self._num_listed[id(script)] = taken + 1
                return self._reply(script[taken], call)
        return self._reply(script(call), call)

    async def _sample(self, call: Call, reply: Reply) -> AsyncGenerator[RequestOutput]:
        if reply.gate is not None:
            await asyncio.wrap_future(reply.gate)
        text, output = "", self._output(call, [], "", "")
        for token_ids in self._prefixes(call, reply):
            await asyncio.sleep(reply.token_delay_s)
            decoded = self.decode(token_ids, skip_special_tokens=call.sampling.skip_special_tokens)
            cut = cut_at_stop(decoded, call.sampling)
            now = cut.text.rstrip("\ufffd")
            output = self._output(call, token_ids, now, now[len(text) :])
            text = now
            logprobs = self._drawn_logprobs(call, token_ids)
            output = dataclasses.replace(output, logprobs=logprobs)
            end = end_of(token_ids, call.sampling, cut)
            if end is not None:
                yield dataclasses.replace(output, finish_reason=end.reason, stop_reason=end.by)
                return
            yield output
        if reply.error is not None:
            raise reply.error
        yield dataclasses.replace(output, text_delta="", finish_reason="stop")

    def _prefixes(self, call: Call, reply: Reply) -> Iterator[list[int]]:
        token_ids = self._tokenizer.encode(reply.text)
        if reply.error is None and not call.sampling.ignore_eos:
            token_ids.append(EOS_TOKEN_ID)
        for length in range(1, len(token_ids) + 1):
            yield token_ids[:length]

    def _output(self, call: Call, token_ids: list[int], text: str, delta: str) -> RequestOutput:
        num_prompt = len(call.token_ids)
        logical_len = num_prompt + len(token_ids)
        thinking, answer = split_thinking(text, call.sampling)
        return RequestOutput(
            request_id=f"call-{id(call)}",
            prompt_token_ids=call.token_ids,
            sample_index=call.sample_index,
            text=text,
            text_delta=delta,
            thinking=thinking,
            answer=answer,
            token_ids=token_ids,
            usage=Usage(prompt_tokens=num_prompt, completion_tokens=len(token_ids)),
            kv=KVUsage(logical_len=logical_len, resident_len=logical_len),
            prompt_logprobs=self._prompt_logprobs(call),
        )

    def _drawn_logprobs(self, call: Call, token_ids: list[int]) -> list[LogprobEntry] | None:
        if call.sampling.logprobs is None:
            return None
        entries = []
        for length, token_id in enumerate(token_ids):
            drawn = self.decode(token_ids[:length], skip_special_tokens=False)
            token = self.decode([token_id], skip_special_tokens=False)
            logprob = self._token_logprob(call.prompt + drawn, token)
            entries.append(LogprobEntry(token_id, logprob, 1, [(token_id, logprob)]))
        return entries

    def _prompt_logprobs(self, call: Call) -> list[LogprobEntry | None] | None:
        if call.sampling.prompt_logprobs is None:
            return None
        entries: list[LogprobEntry | None] = [None]
        for position in range(1, len(call.token_ids)):
            context = self.decode(call.token_ids[:position], skip_special_tokens=False)
            token = self.decode(call.token_ids[position : position + 1], skip_special_tokens=False)
            logprob = self._token_logprob(context, token)
            entries.append(LogprobEntry(call.token_ids[position], logprob, 1, []))
        return entries


def _matching(script: Mapping[Any, Any], prompt: str) -> Any:
    for key, reply in script.items():
        fits = key.search(prompt) if isinstance(key, re.Pattern) else prompt.endswith(key)
        if fits:
            return reply
    raise AssertionError(f"the script has no reply for a prompt that ends {prompt[-80:]!r}")


def __getattr__(name: str) -> Any:
    """What is built on this module, or takes long to load, is loaded when it is asked for."""
    homes = {"StatefulBackend": "scripted_states", "match": "grammar_match"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"zipage_lang.{homes[name]}"), name)
