"""One gen or select as requests to the backend, and what comes back of them.

Knows nothing of queues, variables or roles.
"""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from zipage_lang.backend import Backend
from zipage_lang.choices import ChoiceScores, ScoreResult, all_winners, decide
from zipage_lang.errors import RunCancelledError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.ir import Score, Select
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import KVUsage
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.transcript import split_at_cut

Publish = Callable[[RequestOutput, int], None]  # each output on its way, and its new tokens


def ignore(output: RequestOutput, num_new_tokens: int) -> None:
    """The Publish of outputs that nobody watches."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where requests of one run go."""

    backend: Backend
    group_id: str


async def generate(
    endpoint: Endpoint,
    prompt: Sequence[int],
    sampling: SamplingParams,
    kv: KVParams,
    publish: Publish,
    pattern: "re.Pattern[str] | None" = None,
) -> list[RequestOutput]:
    """The final output of each sample. `publish(output, num_new_tokens)` sees all on their way.

    A match of `pattern` ends a sample and is cut off; leaving the stream stops the request.
    """
    latest: dict[int, RequestOutput] = {}
    stream = endpoint.backend.generate(prompt, sampling, kv=kv, group_id=endpoint.group_id)
    async with contextlib.aclosing(cast("AsyncGenerator[RequestOutput]", stream)) as outputs:
        async for output in outputs:
            if pattern is not None:
                output = _cut_at(pattern, output)
            before = latest.get(output.sample_index)
            latest[output.sample_index] = output
            publish(output, len(output.token_ids) - (len(before.token_ids) if before else 0))
            if pattern is not None and output.is_final:
                break
    if any(output.finish_reason == "abort" for output in latest.values()):
        raise RunCancelledError
    final = [latest[index] for index in sorted(latest) if latest[index].is_final]
    assert len(final) == sampling.n, f"{len(final)} of {sampling.n} samples came to an end"
    return final


def _cut_at(pattern: "re.Pattern[str]", output: RequestOutput) -> RequestOutput:
    found = pattern.search(output.text)
    if found is None:
        return output
    num_shown = len(output.text) - len(output.text_delta)
    num_cut = len(output.text) - found.start()
    return dataclasses.replace(
        output,
        text=output.text[: found.start()],
        answer=output.answer[: max(0, len(output.answer) - num_cut)],
        text_delta=output.text[num_shown : found.start()],
        finish_reason="stop",
        stop_reason=found.group(),
    )


def settle_output(
    backend: Backend, output: RequestOutput, sampling: SamplingParams, text: str
) -> tuple[list[int], str]:
    """The tokens of `text` that go on in the transcript, and what was cut out of a token.

    `text` is the output's text or its beginning. The token that ended the output is dropped: it is
    no part of the value, and inside a role the template's own suffix writes it again.
    """
    if isinstance(output.stop_reason, str) or text != output.text:
        return split_at_cut(
            backend, output.token_ids, text, skip_special_tokens=sampling.skip_special_tokens
        )
    return _without_end(backend, output, sampling), ""


def settle_answer(
    backend: Backend, output: RequestOutput, sampling: SamplingParams, answer: str
) -> tuple[list[int], str]:
    """The tokens of the output's last text, behind a thought; encoded anew off a token's border."""
    token_ids = _without_end(backend, output, sampling)
    skip = sampling.skip_special_tokens
    for start in range(len(token_ids), -1, -1):
        tail = backend.decode(token_ids[start:], skip_special_tokens=skip)
        if tail == answer:
            return token_ids[start:], ""
        if len(tail) > len(answer):
            break
    return backend.encode(answer, add_special_tokens=False), ""


def _without_end(backend: Backend, output: RequestOutput, sampling: SamplingParams) -> list[int]:
    token_ids = list(output.token_ids)
    ends = {*sampling.stop_token_ids, *backend.eos_token_ids}
    if output.finish_reason == "stop" and token_ids and token_ids[-1] in ends:
        token_ids.pop()
    return token_ids


def with_turn_end(backend: Backend, sampling: SamplingParams, suffix: str) -> SamplingParams:
    """Let the special token that the chat template puts behind a message end the output too.

    `suffix` is what the template writes there; some models' end of sequence is another token.
    """
    if sampling.ignore_eos or not suffix:
        return sampling
    first, *_ = backend.encode(suffix, add_special_tokens=False)
    known = first in backend.eos_token_ids or first in sampling.stop_token_ids
    if known or backend.decode([first], skip_special_tokens=True):
        return sampling
    return sampling.replace(stop_token_ids=[*sampling.stop_token_ids, first])


async def score_choices(
    endpoint: Endpoint,
    prompt: Sequence[int],
    node: Select | Score,
    kv: KVParams,
    publish: Publish = ignore,
) -> ScoreResult:
    """Score every choice behind `prompt`, on token ids, all in one batch.

    `publish` sees the outputs of the choices in context.
    """
    rows = [endpoint.backend.encode(c, add_special_tokens=False) for c in node.choices]
    requests = [_score(endpoint, prompt, row, kv, publish) for row in rows]
    needs_alone = isinstance(node, Score) or node.method == "unconditional_likelihood_normalized"
    needs_alone = needs_alone and not hasattr(endpoint.backend, "score_row")
    if needs_alone:
        requests += [_score(endpoint, [], row, kv, ignore) for row in rows]
    scored = await asyncio.gather(*requests)
    inside, alone = scored[: len(rows)], scored[len(rows) :]
    known = ChoiceScores(
        logprobs=[row.logprobs for row in inside],
        unconditional=[row.logprobs for row in alone] if needs_alone else None,
    )
    return _result(node, rows, known, [row.kv for row in inside])


@dataclasses.dataclass(frozen=True)
class _Scored:
    logprobs: list[float]
    kv: KVUsage


async def _score(
    endpoint: Endpoint,
    prompt: Sequence[int],
    choice: Sequence[int],
    kv: KVParams,
    publish: Publish,
) -> _Scored:
    """Log-probability of each of the choice's tokens, and the KV cache they were scored on.

    The first token of all has none; it counts as 0.
    """
    score_row = getattr(endpoint.backend, "score_row", None)  # as Scoring has it
    if score_row is not None:
        logprobs = await score_row(prompt, choice, kv=kv, group_id=endpoint.group_id)
        return _Scored(logprobs, KVUsage())
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        prompt_logprobs_start=len(prompt),  # so that the prompt itself may come from the tree
        ignore_eos=True,
    )
    (output,) = await generate(endpoint, [*prompt, *choice], sampling, kv, publish)
    entries = (output.prompt_logprobs or [])[len(prompt) :]
    assert len(entries) == len(choice), f"{len(entries)} logprobs for {len(choice)} tokens"
    return _Scored([0.0 if entry is None else entry.logprob for entry in entries], output.kv)


def _result(
    node: Select | Score, rows: list[list[int]], known: ChoiceScores, kv: list[KVUsage]
) -> ScoreResult:
    won = decide(node.method, known)
    return ScoreResult(
        choices=node.choices,
        method=node.method,
        index=won.index,
        scores=won.scores,
        distribution=won.distribution,
        winners=all_winners(node.choices, known),
        token_ids=rows,
        logprobs=known.logprobs,
        unconditional_logprobs=known.unconditional,
        kv=max(kv, key=lambda usage: usage.logical_len - usage.resident_len),
    )
