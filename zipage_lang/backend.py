"""What the interpreter needs of an engine, and the adapter that makes an Engine into that.

Knows nothing of programs, states or roles.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from zipage_lang.errors import NoBackendError
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
