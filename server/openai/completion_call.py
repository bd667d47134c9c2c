"""One completion request made ready for the engine: its prompts and their shared sampling.

Knows nothing of HTTP, or of the form in which the answer is told.
"""

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from zipage_lang.frontend.input_checks import check_prompt
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.chat_call import (
    check_model,
    engine_options,
    new_id,
    output_len,
    unaborted,
)
from zipage_lang.server.openai.completion_logprobs import CompletionLogprobs
from zipage_lang.server.openai.completion_request import CompletionRequest
from zipage_lang.server.openai.grammar_fields import grammar_of
from zipage_lang.server.openai.model_traits import ModelTraits
from zipage_lang.server.openai.sampling import bad_field, kv_params, sampling_params
from zipage_lang.server.service import Service
from zipage_lang.server.side_by_side import gathered, merged

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 4096  # of one call, over all prompts


@dataclasses.dataclass(frozen=True)
class CompletionCall:
    """What is asked of the engine, and what is needed to tell its answer.

    hides_output: max_tokens was 0; the one token that had to be drawn is not told.
    """

    service: Service
    request_id: str
    model: str
    created: int  # Unix time
    prompts: list[list[int]]
    echoes: list[str]  # what leads each prompt's texts; "" without echo
    samplings: list[SamplingParams]  # of each prompt
    options: dict[str, Any]  # of Service.generate
    hides_output: bool

    @property
    def num_samples(self) -> int:
        return self.samplings[0].n

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(place of the prompt, output), as they come. Raises ApiError; closing it aborts all."""
        streams = [
            self.service.generate(ids, self.samplings[place], **self._engine_options(place))
            for place, ids in enumerate(self.prompts)
        ]
        async with aclosing(merged(streams)) as merged_outputs:
            async for place, output in merged_outputs:
                yield place, unaborted(self.service, output)

    async def complete(self) -> list[list[RequestOutput]]:
        """The last outputs of each prompt's samples. Raises ApiError."""
        results = await gathered(
            [
                self.service.complete(ids, self.samplings[place], **self._engine_options(place))
                for place, ids in enumerate(self.prompts)
            ]
        )
        return [[unaborted(self.service, output) for output in outputs] for outputs in results]

    def new_logprobs(self, prompt_index: int) -> CompletionLogprobs | None:
        """For one sample; None where they are not wanted."""
        sampling = self.samplings[prompt_index]
        if sampling.logprobs is None:
            return None
        return CompletionLogprobs(
            self.service.llm.tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            echoed=self.prompts[prompt_index] if sampling.prompt_logprobs is not None else (),
        )

    def _engine_options(self, place: int) -> dict[str, Any]:
        """A lone prompt's request has the call's own name."""
        request_id = self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{place}"
        group = self.options["group_id"] or self.request_id
        return {**self.options, "request_id": request_id, "group_id": group}


async def prepare_completion(
    service: Service, traits: ModelTraits, body: CompletionRequest
) -> CompletionCall:
    """Raises ApiError for what can't be done."""
    check_model(service, body.model)
    _check_legacy(body)
    texts = await _prompts(service, body)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked = DEFAULT_MAX_TOKENS if asked is None else asked
    kv = kv_params(body)
    grammar = grammar_of(body, body.response_format)
    samplings = [
        sampling_params(
            body,
            traits.sampling,
            max_tokens=output_len(service, len(ids), max(asked, 1), kv),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            **grammar,
        )
        for ids in texts
    ]
    return CompletionCall(
        service=service,
        request_id=new_id("cmpl", body),
        model=body.model or service.model_name,
        created=int(time.time()),
        prompts=texts,
        echoes=[_echo(service, body, ids, place) for place, ids in enumerate(texts)],
        samplings=samplings,
        options=engine_options(service, body, kv),
        hides_output=asked == 0,
    )


def _check_legacy(body: CompletionRequest) -> None:
    if body.suffix:
        raise ApiError(400, "suffix is not supported: the model does not fill in", param="suffix")
    num_samples = body.n or 1
    if body.best_of is not None and body.best_of != num_samples:
        raise ApiError(
            400,
            f"best_of={body.best_of} must equal n={num_samples}: ask for n choices and choose",
            param="best_of",
        )


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """The prompts' token ids. Raises ApiError 400."""
    given = body.prompt
    if isinstance(given, str):
        prompts: list[Any] = [given]
    elif given and isinstance(given[0], int):
        prompts = [given]
    else:
        prompts = list(given)
    if not prompts:
        raise ApiError(400, "prompt is an empty list; give at least one text", param="prompt")
    num_choices = len(prompts) * (body.n or 1)
    if num_choices > MAX_CHOICES:
        raise ApiError(
            400,
            f"the call asks for {num_choices} choices; at most {MAX_CHOICES} go into one",
            param="prompt",
        )
    if len(prompts) > 1:
        service.check_size(num_choices)
    adds = body.add_special_tokens is not False
    return [await _ids(service, prompt, adds_special_tokens=adds) for prompt in prompts]


async def _ids(service: Service, prompt: Any, *, adds_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        ids = list(prompt)
    else:
        ids = await service.encode(prompt, add_special_tokens=adds_special_tokens)
    if ids:
        return ids
    bos = service.llm.tokenizer.bos_token_id
    if isinstance(prompt, str) and bos is not None:
        return [bos]  # an empty text begins where every text does
    raise ApiError(400, "a prompt is empty; give at least one token", param="prompt")


def _echo(service: Service, body: CompletionRequest, ids: list[int], place: int) -> str:
    if not body.echo:
        return ""
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[place]
    if isinstance(prompt, str):
        return prompt
    with bad_field("prompt"):
        check_prompt(ids, service.ready)  # what is no token has no text either
    skips = body.skip_special_tokens is not False
    return service.llm.tokenizer.decode(ids, skip_special_tokens=skips)
