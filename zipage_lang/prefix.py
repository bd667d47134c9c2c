"""Computes what a program says before its first call, and lets the program get no further.

Knows nothing of programs' bodies or of what a cache keeps.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from zipage_lang.backend import Backend
from zipage_lang.frontend.errors import ZipageError
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams


class PrefixComputed(ZipageError):
    """The program has come to its first call; it goes no further."""

    def __init__(self) -> None:
        super().__init__("the prefix is computed; nothing else is")


class PrefixBackend:
    """A Backend that computes the first prompt it gets and answers no call."""

    def __init__(self, inner: Backend) -> None:
        self.num_tokens = 0  # of the prompt that was computed
        self._inner = inner

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._inner.loop

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._inner.eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        return self._inner.render_chat(messages, add_generation_prompt=add_generation_prompt)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, kv: KVParams, group_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Raises PrefixComputed, after the first prompt was computed."""
        if not self.num_tokens:
            self.num_tokens = len(token_ids)
            one = SamplingParams(max_tokens=1, temperature=0.0)
            async for _ in self._inner.generate(token_ids, one, kv=kv, group_id=group_id):
                pass  # what is drawn is of no use; the prompt stays in the cache
        raise PrefixComputed
        yield  # an async generator, as Backend.generate is

    async def abort(self, group_id: str) -> None:
        await self._inner.abort(group_id)
