"""`Engine`: the blocking door for scripts, with one event loop in a thread of its own.

Knows nothing of ZMQ, tokenizers or how text is put together.
"""

import asyncio
import atexit
import concurrent.futures
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from zipage_lang.frontend.async_llm import AsyncLLM, Prompt
from zipage_lang.frontend.client import Stats
from zipage_lang.frontend.errors import EngineClosedError
from zipage_lang.frontend.input_checks import check_sampling
from zipage_lang.frontend.outputs import Progress, RequestOutput
from zipage_lang.frontend.progress_bar import progress_reporter
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import Ready, Starting
from zipage_lang.runtime.sampling_params import SamplingParams

T = TypeVar("T")
POLL_S = 0.1  # how often a waiting caller looks up: for Ctrl-C and progress
CANCEL_GRACE_S = 2.0


class Engine:
    """A running engine process, say `Engine("smollm2-135m", kv_mode="fixed", kv_budget=256)`. A
    context manager.

    Parameters:
        model: a known name, a folder, a GGUF file or a hub id.
        engine_command: another program to start as the engine process.
        on_progress: hears what the engine is at while it starts, from another thread.
        options: those of EngineConfig, flat.

    Errors: ValueError for an unknown or bad option, EngineStartError where it does not come up.

    >>> zipage.Engine("smollm2-135m", kv_mode="sometimes")
    Traceback (most recent call last):
    ValueError: kv mode='sometimes' must be one of off, fixed, adaptive
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        engine_command: Sequence[str] | None = None,
        on_progress: Callable[[Starting], None] = lambda _: None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(model=model, **options)
        self._is_closed = False
        self._lock = threading.Lock()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="zipage-loop", daemon=True)
        self._thread.start()
        try:
            started = AsyncLLM.start(config, command=engine_command, on_progress=on_progress)
            self.async_llm = self._wait(self.submit(started))
        except BaseException:
            self._is_closed = True
            self._stop_loop()
            raise
        atexit.register(self.close)

    @property
    def ready(self) -> Ready:
        """What the engine said of itself: model, limits, pool size."""
        return self.async_llm.ready

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        kv: KVParams | None = None,
        progress: bool | Callable[[Progress], None] = False,
    ) -> list[RequestOutput]:
        """Final outputs of all prompts, prompt-major: sample j of prompt i is at i * n + j.

        All prompts are sent at once and run as one batch. `sampling` is one for all or one per
        prompt. `progress`: True draws a bar on stderr; a function is called about ten times a
        second. The first error is raised, after the other requests were aborted; so does Ctrl-C.
        """
        requests = self._pair(prompts, SamplingParams() if sampling is None else sampling)
        counted = Progress(num_samples=sum(params.n for _, params in requests))
        outputs = self.submit(self._complete_all(requests, kv, counted))
        with progress_reporter(progress) as report:
            return self._wait(outputs, lambda: report(counted))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Outputs of one prompt as they come. Options as for `AsyncLLM.generate`.

        Leaving the iterator early aborts the request. Raises ValueError at once for bad input.
        """
        self._check_usable()
        return self._iterate(self.async_llm.generate(prompt, sampling, **options))

    def stats(self) -> Stats:
        """Counters and gauges of the engine."""
        return self._call(lambda: self.async_llm.stats())

    def flush_cache(self) -> Stats:
        """Evict all that no request holds; the stats after it."""
        return self._call(lambda: self.async_llm.flush_cache())

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the engine's event loop."""
        try:
            self._check_usable()
        except BaseException:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """End the engine process and the loop. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            closing = self.submit(self.async_llm.close())
            self._is_closed = True
        atexit.unregister(self.close)
        self._wait(closing)
        self._stop_loop()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pair(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
    ) -> list[tuple[list[int], SamplingParams]]:
        """Each prompt's token ids with its sampling. Tokenised here, not in the loop's thread."""
        self._check_usable()
        token_lists = [self.async_llm.encode_prompt(prompt) for prompt in _as_prompts(prompts)]
        if not isinstance(sampling, (list, tuple)):
            return [(token_ids, check_sampling(sampling)) for token_ids in token_lists]
        if len(sampling) != len(token_lists):
            raise ValueError(
                f"{len(sampling)} sampling params for {len(token_lists)} prompts; give one for all "
                "or one per prompt"
            )
        return list(zip(token_lists, map(check_sampling, sampling), strict=True))

    async def _complete_all(
        self,
        requests: list[tuple[list[int], SamplingParams]],
        kv: KVParams | None,
        progress: Progress,
    ) -> list[RequestOutput]:
        tasks = [
            asyncio.create_task(self.async_llm.complete(ids, params, kv=kv, progress=progress))
            for ids, params in requests
        ]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:  # after an error or Ctrl-C the others leave too
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [output for group in outputs for output in group]

    def _iterate(self, outputs: AsyncIterator[RequestOutput]) -> Iterator[RequestOutput]:
        arrived: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()
        pump = self.submit(_pump(outputs, arrived))
        try:
            while (output := arrived.get()) is not None:
                yield output
            pump.result()
        finally:
            pump.cancel()

    def _call(self, make_work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_usable()
        return self._wait(self.submit(make_work()))

    def _wait(
        self, work: concurrent.futures.Future[T], on_poll: Callable[[], None] = lambda: None
    ) -> T:
        """The result of work in the loop; whatever interrupts the wait cancels the work."""
        try:
            while True:
                concurrent.futures.wait([work], timeout=POLL_S)
                on_poll()
                if work.done():
                    return work.result()
        except BaseException:
            if work.cancel():
                concurrent.futures.wait([work], timeout=CANCEL_GRACE_S)
            raise

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed; start a new one with Engine(...)")
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "blocking calls can't be made from the engine's own event loop; await "
                "engine.async_llm there"
            )

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _stop_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def _pump(
    outputs: AsyncIterator[RequestOutput], arrived: "queue.SimpleQueue[RequestOutput | None]"
) -> None:
    try:
        async for output in outputs:
            arrived.put(output)
    finally:
        arrived.put(None)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text or token ids) or many, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(
            f"prompts={prompts!r:.80} must be a string, a list of strings or token ids"
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)
