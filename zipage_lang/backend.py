"""What the interpreter needs of an engine, and the adapter that makes an Engine into that.

Knows nothing of programs, states or roles.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from zipage_lang.errors import NoBackendError, UnsupportedError
from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.errors import EngineClosedError
from zipage_lang.frontend.llm import Engine
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.frontend.pin_board import PinBoard
from zipage_lang.loops import LoopBridge
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams


@runtime_checkable
class Backend(Protocol):
    """Token ids in, RequestOutputs out, on one event loop; and the model's tokenizer."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where `generate` and `abort` must run, and so where programs run."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens of a chat template are recognised."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`."""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        """The messages as the model's own chat template writes them."""

    def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv: KVParams,
        group_id: str,
    ) -> AsyncIterator[RequestOutput]:
        """Stream cumulative outputs, each sample's last one with a finish_reason.

        Closing the iterator early aborts the request. Errors are raised by the iterator.
        """

    async def abort(self, group_id: str) -> None:
        """End all requests of the group and free their memory."""


@runtime_checkable
class Limited(Protocol):
    """A backend that can't do all there is: it says so where a call is appended."""

    def check_gen(self, sampling: SamplingParams, kv: KVParams) -> None:
        """Raises UnsupportedError for fields that this backend would have to ignore."""

    def check_select(self, method: str, kv: KVParams) -> None:
        """Raises UnsupportedError where choices can't be scored by this method."""

    def check_role(self) -> None:
        """Raises UnsupportedError where chat messages can't be written."""

    def check_token_ids(self) -> None:
        """Raises UnsupportedError where the state has no token ids to show."""


@runtime_checkable
class Administered(Protocol):
    """A backend whose server can be asked about itself."""

    async def flush_cache(self) -> Mapping[str, Any]:
        """Evict all that no request holds; the server's counters after it."""

    async def server_info(self) -> Mapping[str, Any]:
        """What the server is and its counters."""


@runtime_checkable
class Scoring(Protocol):
    """A backend that scores choices its own way, without log-probabilities of prompts."""

    async def score_row(
        self, token_ids: Sequence[int], choice: Sequence[int], *, kv: KVParams, group_id: str
    ) -> list[float]:
        """Log-probability of each of the choice's tokens, as the server cuts them."""


class EngineBackend:
    """An engine's async door as a Backend."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._loop = loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Raises EngineClosedError when the engine was closed."""
        if self._loop.is_closed():
            raise EngineClosedError("the engine is closed; start a new one with Engine(...)")
        return self._loop

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self._llm.ready.eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._llm.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._llm.tokenizer.decode(token_ids, skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        return self._llm.tokenizer.render_chat(
            messages, add_generation_prompt=add_generation_prompt
        )

    def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv: KVParams,
        group_id: str,
    ) -> AsyncIterator[RequestOutput]:
        return self._llm.generate(token_ids, sampling, kv=kv, group_id=group_id)

    async def abort(self, group_id: str) -> None:
        self._llm.abort(group_ids=[group_id])

    @property
    def pins(self) -> PinBoard:
        return self._llm.pins

    def generate_from(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv: KVParams,
        group_id: str,
        request_id: str,
        parent_id: str | None,
        hold: bool,
    ) -> AsyncIterator[RequestOutput]:
        return self._llm.generate(
            token_ids,
            sampling,
            kv=kv,
            group_id=group_id,
            request_id=request_id,
            parent_id=parent_id,
            hold=hold,
        )

    async def compute(
        self,
        token_ids: Sequence[int],
        *,
        kv: KVParams,
        group_id: str,
        request_id: str,
        parent_id: str | None,
    ) -> None:
        await self._llm.complete(
            token_ids,
            SamplingParams(max_tokens=1, temperature=0.0),
            kv=kv,
            group_id=group_id,
            request_id=request_id,
            parent_id=parent_id,
            hold=True,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        self._llm.release(request_ids)

    async def flush_cache(self) -> Mapping[str, Any]:
        return await self._llm.flush_cache()

    async def server_info(self) -> Mapping[str, Any]:
        return {**msgspec.structs.asdict(self._llm.ready), **await self._llm.stats()}


def as_backend(given: Any) -> Backend:
    """An Engine, an AsyncLLM of the running loop, or a Backend, as a Backend. Raises TypeError."""
    if isinstance(given, Engine):
        return EngineBackend(given.async_llm, given.loop)
    if isinstance(given, AsyncLLM):
        return EngineBackend(given, asyncio.get_running_loop())
    if isinstance(given, Backend):
        return given
    raise TypeError(f"backend={given!r} must be a zipage.Engine or have the methods of a Backend")


class _Default:
    """The backend of programs that name none: one per process, since the language has one."""

    backend: Backend | None = None


def set_default_backend(backend: Any) -> None:
    """Programs run on this backend unless `run` names another.

    Parameters:
        backend: an Engine, an AsyncLLM of the running loop, or anything with the methods of a
            Backend; None takes the default back.

    Errors: TypeError for anything else.

    >>> zipage.set_default_backend(zipage.testing.ScriptedBackend("yes"))
    >>> zipage.function(lambda s: s.append(zipage.gen("a"))).run()["a"]
    'yes'
    """
    _Default.backend = None if backend is None else as_backend(backend)


def default_backend() -> Backend:
    """Raises NoBackendError when none was set."""
    if _Default.backend is None:
        raise NoBackendError
    return _Default.backend


def flush_cache(backend: Any = None) -> Mapping[str, Any]:
    """Evict all KV that no request holds, and wait until it is done.

    Parameters:
        backend: as for `set_default_backend`; None is the default one.

    Returns the server's counters after it. Errors: NoBackendError without a backend,
    UnsupportedError for one whose server can't be asked, LoopThreadError on the backend's own loop.

    >>> zipage.flush_cache(zipage.testing.ScriptedBackend())
    Traceback (most recent call last):
    zipage_lang.errors.UnsupportedError: ScriptedBackend can't do flush_cache
    """
    return _ask(backend, "flush_cache")


def get_server_info(backend: Any = None) -> Mapping[str, Any]:
    """What the server is (model, limits) and its counters.

    Parameters:
        backend: as for `set_default_backend`; None is the default one.

    Errors: NoBackendError without a backend, UnsupportedError for one whose server can't be asked,
    LoopThreadError on the backend's own loop.

    >>> zipage.get_server_info(zipage.testing.ScriptedBackend())
    Traceback (most recent call last):
    zipage_lang.errors.UnsupportedError: ScriptedBackend can't do server_info
    """
    return _ask(backend, "server_info")


def _ask(given: Any, what: str) -> Mapping[str, Any]:
    backend = default_backend() if given is None else as_backend(given)
    if not isinstance(backend, Administered):
        raise UnsupportedError(backend, what)
    asked: Mapping[str, Any] = LoopBridge(backend.loop).wait(getattr(backend, what)())
    return asked
