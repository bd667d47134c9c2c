"""The state of an `async def` program: reads are awaited.

Knows nothing of how expressions run or of decorators.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator
from typing import Any

from zipage_lang.branches import AsyncBranches
from zipage_lang.budgets import Budget
from zipage_lang.kv_report import KVReport
from zipage_lang.meta_info import MetaInfo, kv_report_of, meta_info
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.scratch import adopted, core_to_adopt, scratch_core
from zipage_lang.state import StateHandle
from zipage_lang.text_pieces import TextSource, pieces_of
from zipage_lang.variables import Variable


class AsyncState(StateHandle):
    """The state of an `async def` program: reads are awaited, `await s["x"]`.

    Parameters and errors: as for ProgramState.

    >>> async def body(s): return await s.append(zipage.gen("a"))["a"]
    >>> zipage.function(body).run().ret_value
    '42'
    """

    def __getitem__(self, name: str) -> Awaitable[Any]:
        """As ProgramState's, to be awaited; KeyError at once for a name never queued."""
        return asyncio.wrap_future(self._known(name).value)

    def meta(self, name: str) -> Awaitable[Any]:
        """As ProgramState.meta."""
        return asyncio.wrap_future(self._known(name).meta)

    def get_var(self, name: str) -> Awaitable[Any]:
        """As ProgramState.get_var."""
        return self[name]

    async def get_meta_info(self, name: str) -> MetaInfo | None:
        """As ProgramState.get_meta_info."""
        return meta_info(await self.meta(name), self._spell) if name in self else None

    async def kv(self, name: str | None = None) -> KVReport:
        """As ProgramState.kv."""
        if name is None:
            await self.sync()
            return self.core.kv_report
        return kv_report_of(await self.meta(name))

    async def text(self) -> str:
        """As ProgramState.text."""
        await self.core.drained()
        return self.core.text

    async def token_ids(self) -> list[int]:
        """As ProgramState.token_ids."""
        await self.core.drained()
        return self.core.token_ids

    async def messages(self) -> list[dict[str, str]]:
        """As ProgramState.messages."""
        await self.core.drained()
        return self.core.messages

    async def sync(self) -> None:
        """As ProgramState.sync."""
        await self.core.settled()

    async def error(self) -> BaseException | None:
        """As ProgramState.error."""
        await self.sync()
        return self.core.error

    def scratch(self) -> "contextlib.AbstractContextManager[AsyncState]":
        """As ProgramState.scratch: a plain `with`, since nothing is waited for."""
        return self._scratch()

    @contextlib.contextmanager
    def _scratch(self) -> "Generator[AsyncState]":
        with scratch_core(self.core) as core:
            yield AsyncState(core)

    async def adopt(self, branch: StateHandle) -> None:
        """As ProgramState.adopt."""
        await adopted(self.core, core_to_adopt(branch))

    @contextlib.asynccontextmanager
    async def copy(self, *, kv: KVParams | None = None) -> "AsyncGenerator[AsyncState]":
        """As ProgramState.copy, with `async with`."""
        branches = self.fork(1, kv=kv)
        yield branches[0]
        await branches.join()

    def fork(
        self, num_branches: int = 1, *, kv: KVParams | None = None, budget: Budget | None = None
    ) -> AsyncBranches["AsyncState"]:
        """As ProgramState.fork."""
        cores = self.core.fork(num_branches, kv, budget)
        return AsyncBranches(self.core, [AsyncState(core) for core in cores])

    def text_async_iter(
        self, name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """As ProgramState.text_async_iter."""
        source = TextSource(self.core.deltas, self._when_known, self._when_all_done)
        return pieces_of(source, name, return_meta_data)

    async def _when_known(self, name: str) -> Variable:
        return self._known(name)

    async def _when_all_done(self) -> None:
        await self.core.drained()
