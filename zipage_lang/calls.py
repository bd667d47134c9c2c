"""One gen or select as requests to the backend, and what comes back of them.

Knows nothing of queues, variables or roles.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from zipage_lang.backend import Backend
from zipage_lang.choices import ChoiceScores, Selection, decide
from zipage_lang.errors import RunCancelledError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.ir import Select
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.transcript import split_at_cut


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where requests of one run go."""

    backend: Backend
    group_id: str


@dataclasses.dataclass(frozen=True)
class SelectOutput:
    """What `s.meta(name)` holds for a select: the winner, and what is known of each choice.

    `logprobs[choice][token]` are in context; `compactions` counts those the scored contexts went
    through, so 0 says that the scores are those of the full KV cache.
    """

    choices: tuple[str, ...]
    choice: str
    index: int
    scores: list[float]
    distribution: list[float]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    unconditional_logprobs: list[list[float]] | None
    compactions: int


async def generate(
    endpoint: Endpoint,
    prompt: Sequence[int],
    sampling: SamplingParams,
    kv: KVParams,
    publish: Callable[[RequestOutput, int], None],
) -> list[RequestOutput]:
    """The final output of each sample. `publish(output, num_new_tokens)` sees all on their way."""
    latest: dict[int, RequestOutput] = {}
    stream = endpoint.backend.generate(prompt, sampling, kv=kv, group_id=endpoint.group_id)
    async with contextlib.aclosing(cast("AsyncGenerator[RequestOutput]", stream)) as outputs:
        async for output in outputs:
            before = latest.get(output.sample_index)
            latest[output.sample_index] = output
            publish(output, len(output.token_ids) - (len(before.token_ids) if before else 0))
    if any(output.finish_reason == "abort" for output in latest.values()):
        raise RunCancelledError
    final = [latest[index] for index in sorted(latest) if latest[index].is_final]
    assert len(final) == sampling.n, f"{len(final)} of {sampling.n} samples came to an end"
    return final


def settle_output(
    backend: Backend, output: RequestOutput, sampling: SamplingParams
) -> tuple[list[int], str]:
    """The tokens that go on in the transcript, and text that a stop string cut out of a token.

    The token that ended the output is dropped: it is no part of the value, and inside a role the
    template's own suffix writes it again.
    """
    if isinstance(output.stop_reason, str):
        return split_at_cut(
            backend,
            output.token_ids,
            output.text,
            skip_special_tokens=sampling.skip_special_tokens,
        )
    token_ids = list(output.token_ids)
    ends = {*sampling.stop_token_ids, *backend.eos_token_ids}
    if output.finish_reason == "stop" and token_ids and token_ids[-1] in ends:
        token_ids.pop()
    return token_ids, ""


async def score_choices(
    endpoint: Endpoint, prompt: Sequence[int], node: Select, kv: KVParams
) -> SelectOutput:
    """Score every choice behind `prompt`, on token ids, all in one batch."""
    rows = [endpoint.backend.encode(c, add_special_tokens=False) for c in node.choices]
    requests = [_score(endpoint, prompt, row, kv) for row in rows]
    needs_alone = node.method == "unconditional_likelihood_normalized"
    if needs_alone:
        requests += [_score(endpoint, [], row, kv) for row in rows]
    scored = await asyncio.gather(*requests)
    known = ChoiceScores(
        logprobs=[logprobs for logprobs, _ in scored[: len(rows)]],
        unconditional=[logprobs for logprobs, _ in scored[len(rows) :]] if needs_alone else None,
    )
    won = decide(node.method, known)
    return _select_output(node, rows, known, won, max(compactions for _, compactions in scored))


async def _score(
    endpoint: Endpoint, prompt: Sequence[int], choice: Sequence[int], kv: KVParams
) -> tuple[list[float], int]:
    """Log-probability of each of the choice's tokens, and the compactions the request went through.

    The first token of all has none; it counts as 0.
    """
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        prompt_logprobs_start=len(prompt),  # so that the prompt itself may come from the tree
        ignore_eos=True,
    )
    ignore: Callable[[RequestOutput, int], None] = lambda output, num_new_tokens: None  # noqa: E731
    (output,) = await generate(endpoint, [*prompt, *choice], sampling, kv, ignore)
    entries = (output.prompt_logprobs or [])[len(prompt) :]
    assert len(entries) == len(choice), f"{len(entries)} logprobs for {len(choice)} tokens"
    return [0.0 if e is None else e.logprob for e in entries], output.kv.compactions


def _select_output(
    node: Select,
    rows: list[list[int]],
    known: ChoiceScores,
    won: Selection,
    compactions: int,
) -> SelectOutput:
    return SelectOutput(
        choices=node.choices,
        choice=node.choices[won.index],
        index=won.index,
        scores=won.scores,
        distribution=won.distribution,
        token_ids=rows,
        logprobs=known.logprobs,
        unconditional_logprobs=known.unconditional,
        compactions=compactions,
    )
