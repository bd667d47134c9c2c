"""Text in, streams of text out: tokenizer, engine client and detokenizers put together.

Knows nothing of ZMQ, blocks, or threads; lives in one asyncio event loop.
"""

import asyncio
import contextlib
import importlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zipage_lang.frontend.client import ENGINE_TIMEOUT_S, EngineClient, Stats
from zipage_lang.frontend.errors import RequestError, ZipageError
from zipage_lang.frontend.input_checks import check_prompt, check_request, check_text_len
from zipage_lang.frontend.outputs import Progress, RequestOutput
from zipage_lang.frontend.pin_board import PinBoard
from zipage_lang.frontend.sample_builder import SampleBuilder
from zipage_lang.frontend.stop_strings import StopMatcher
from zipage_lang.frontend.thinking import ThinkSplit, ThinkTexts
from zipage_lang.frontend.token_stream import TokenStream
from zipage_lang.frontend.tokenizer import Tokenizer, load_tokenizer
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, Fork, Ready, Starting, Stop, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.snapshot import Snapshot

Prompt = str | Sequence[int]


class AsyncLLM:
    """An engine that takes and gives text. Make one with `await AsyncLLM.start(config)`."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.client = client
        self.pins = PinBoard()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] | None = None,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        on_progress: Callable[[Starting], None] = lambda _: None,
    ) -> "AsyncLLM":
        """Start an engine process and load its model's tokenizer.

        `command`, `engine_timeout_s` and `on_progress` as in EngineClient.start. Raises
        EngineStartError or ValueError (no tokenizer).
        """
        helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zipage-start")
        try:
            # Importing it takes seconds: do so while the engine loads.
            helper.submit(importlib.import_module, "transformers")
            client = await EngineClient.start(
                config, command=command, engine_timeout_s=engine_timeout_s, on_progress=on_progress
            )
            tokenizer = await _or_close(
                client, _load_tokenizer(client.ready.model_path, helper, on_progress)
            )
        finally:
            helper.shutdown(wait=False, cancel_futures=True)
        return cls(client, tokenizer)

    @classmethod
    async def connect(
        cls,
        address: str,
        keys: str | Path,
        *,
        tokenizer: str | Path | None = None,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
    ) -> "AsyncLLM":
        """Join an engine that runs elsewhere, as EngineClient.connect does; errors as there.

        `tokenizer`: a folder or GGUF file of this machine; None: where the engine has its model.
        """
        client = await EngineClient.connect(address, keys, engine_timeout_s=engine_timeout_s)
        path = tokenizer or client.ready.model_path
        return cls(client, await _or_close(client, asyncio.to_thread(load_tokenizer, path)))

    @property
    def silent_s(self) -> float:
        """How long the engine has given no sign of life: some seconds in a long step."""
        return self.client.silent_s

    @property
    def table_sizes(self) -> dict[str, int]:
        """Entries of what is kept for requests that have not ended, and of pins, by name."""
        return {**self.client.table_sizes, "pins": len(self.pins)}

    @property
    def ready(self) -> Ready:
        """What the engine said of itself: model, limits, end-of-sequence tokens, pool size."""
        return self.client.ready

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against the model's limits. Callable from any thread.

        Text gets the tokenizer's own special tokens; token ids go as they are. Raises ValueError.
        """
        if not isinstance(prompt, str):
            return check_prompt(prompt, self.ready)
        check_text_len(prompt, self.tokenizer.longest_token_len, self.ready.max_model_len)
        return check_prompt(self.tokenizer.encode(prompt), self.ready)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        kv: KVParams | None = None,
        namespace: str = "",
        priority: int = 0,
        tenant: str = "",
        group_id: str = "",
        hold: bool = False,
        request_id: str | None = None,
        parent_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream one request; the samples of n > 1 come interleaved, told apart by sample_index.

        The request is sent when iteration starts; closing the iterator early aborts it. With
        `parent_id` it starts from that request's state. `tenant`: whose it is, where several share
        the engine. Raises ValueError at once for bad input,
        RequestError or EngineDiedError while iterating.
        """
        request, parent_id = self._new_request(
            prompt,
            sampling,
            kv=kv,
            namespace=namespace,
            priority=priority,
            tenant=tenant,
            group_id=group_id,
            hold=hold,
            request_id=request_id,
            parent_id=parent_id,
        )
        return self._stream(request, parent_id)

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The final outputs of one request, by sample_index. Options as for `generate`.

        Cheaper than iterating: nothing cumulative is built on the way. `progress` is counted up.
        """
        request, parent_id = self._new_request(prompt, sampling, **options)
        final: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self._run(request, parent_id, progress)) as samples:
            async for sample in samples:
                if sample.is_final:
                    output = sample.snapshot()
                    final[output.sample_index] = output
        return [final[sample_index] for sample_index in sorted(final)]

    def abort(self, request_ids: Iterable[str] = (), group_ids: Iterable[str] = ()) -> None:
        """End requests; whoever iterates them gets final outputs with finish_reason "abort"."""
        self.client.abort(request_ids, group_ids)

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop the states kept by `hold=True`."""
        self.client.release(request_ids)

    async def stats(self) -> Stats:
        """Counters and gauges of the engine."""
        return await self.client.stats()

    async def snapshot(self, **limits: int) -> Snapshot:
        """A picture of pool, tree and requests; limits as EngineClient.snapshot takes them."""
        return await self.client.snapshot(**limits)

    async def flush_cache(self) -> Stats:
        """Evict all that no request holds; the stats after it."""
        return await self.client.flush_cache()

    async def wait_end(self) -> ZipageError:
        """Wait until the engine is gone, died or closed; the error that everybody gets."""
        return await self.client.wait_end()

    async def close(self) -> None:
        """End the engine process. May be called again."""
        await self.client.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _new_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        request_id: str | None = None,
        parent_id: str | None = None,
        **fields: Any,
    ) -> tuple[AddRequest, str | None]:
        request = AddRequest(
            request_id=new_request_id() if request_id is None else request_id,
            token_ids=self.encode_prompt(prompt),
            sampling=SamplingParams() if sampling is None else sampling,
            **fields,
        )
        check_request(request, self.ready)
        return request, parent_id

    async def _stream(
        self, request: AddRequest, parent_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        async with contextlib.aclosing(self._run(request, parent_id, None)) as samples:
            async for sample in samples:
                yield sample.snapshot()

    async def _run(
        self, request: AddRequest, parent_id: str | None, progress: Progress | None
    ) -> AsyncGenerator[SampleBuilder, None]:
        """Send the request; yield a sample each time it has moved on."""
        stream = self._send(request, parent_id)
        samples = self._new_samples(request)
        try:
            async for output in stream:
                sample = samples[output.sample_index]
                num_before = sample.num_tokens
                if self._advance(samples, output):
                    if progress is not None:
                        progress.count(sample.num_tokens - num_before, sample.is_final)
                    yield sample
        finally:
            stream.close()

    def _send(self, request: AddRequest, parent_id: str | None) -> TokenStream:
        if parent_id is None:
            return self.client.add(request)
        return self.client.fork(Fork(parent_id=parent_id, children=[request]))[0]

    def _new_samples(self, request: AddRequest) -> list[SampleBuilder]:
        sampling = request.sampling
        stops = sampling.stop_strings
        return [
            SampleBuilder(
                request.request_id,
                request.token_ids,
                sample_index,
                self.tokenizer.new_detokenizer(sampling.skip_special_tokens),
                StopMatcher(stops, sampling.min_tokens) if stops else None,
                self._new_split(sampling),
            )
            for sample_index in range(sampling.n)
        ]

    def _new_split(self, sampling: SamplingParams) -> ThinkSplit | None:
        if sampling.think is None:
            return None
        return ThinkSplit(
            ThinkTexts.of(sampling.think, lambda ids: self.tokenizer.decode(ids, False))
        )

    def _advance(self, samples: list[SampleBuilder], output: TokenOutput) -> bool:
        """Apply one engine output; False where it changes nothing that the reader sees."""
        if output.error is not None:
            has_run = output.usage.prompt_tokens > 0
            raise RequestError(output.request_id, output.error, has_run=has_run)
        if output.prompt_logprobs is not None:
            for sibling in samples:
                sibling.prompt_logprobs = output.prompt_logprobs
        sample = samples[output.sample_index]
        had_stopped = sample.hit_stop_string
        sample.feed(output)
        if sample.hit_stop_string and not had_stopped and not output.is_final:
            self.client.stop(
                Stop(
                    request_id=output.request_id,
                    sample_index=output.sample_index,
                    num_output_tokens=sample.num_tokens,
                )
            )
        return output.is_final or not had_stopped


async def _load_tokenizer(
    path: str, helper: ThreadPoolExecutor, on_progress: Callable[[Starting], None]
) -> Tokenizer:
    on_progress(Starting(stage="loading the tokenizer"))
    tokenizer = await asyncio.get_running_loop().run_in_executor(helper, load_tokenizer, path)
    on_progress(Starting(stage="loading the tokenizer", done=1, total=1))
    return tokenizer


async def _or_close(client: EngineClient, work: Awaitable[Tokenizer]) -> Tokenizer:
    try:
        return await work
    except BaseException:
        await client.close()
        raise


def new_request_id() -> str:
    """An id that no other request has, in any process."""
    return uuid.uuid4().hex
