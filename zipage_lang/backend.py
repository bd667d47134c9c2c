"""What the interpreter needs of an engine, and the adapter that makes an Engine into that.

Knows nothing of programs, states or roles.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from zipage_lang.errors import NoBackendError
from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.errors import EngineClosedError
from zipage_lang.frontend.llm import Engine
from zipage_lang.frontend.outputs import RequestOutput
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
    """Programs run on this Engine or Backend unless `run` names another; None takes it back."""
    _Default.backend = None if backend is None else as_backend(backend)


def default_backend() -> Backend:
    """Raises NoBackendError when none was set."""
    if _Default.backend is None:
        raise NoBackendError
    return _Default.backend
