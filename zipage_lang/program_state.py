"""The state of a `def` program: reads block until the value is there.

Knows nothing of how expressions run or of decorators.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from typing import Any

from zipage_lang.branches import Branches
from zipage_lang.budgets import Budget
from zipage_lang.kv_report import KVReport
from zipage_lang.loops import LoopBridge
from zipage_lang.meta_info import MetaInfo, kv_report_of, meta_info
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.scratch import adopted, core_to_adopt, scratch_core
from zipage_lang.state import StateHandle
from zipage_lang.state_core import StateCore
from zipage_lang.text_pieces import TextSource, pieces_of, texts
from zipage_lang.variables import Variable


class ProgramState(StateHandle):
    """The state of a `def` program, and what `run` returns: reads block until the value is there.

    Parameters: none of a program's concern; states are made by `run` and `fork`.

    Errors: a failed call raises its own error where its value (or the text behind it) is read; a
    name never queued is a KeyError.

    >>> state = zipage.function(lambda s: s.append("1 + 1 = " + zipage.gen("sum"))).run()
    >>> state["sum"], state.text(), state.error()
    ('42', '1 + 1 = 42', None)
    """

    def __init__(self, core: StateCore, body: "Future[Any] | None" = None) -> None:
        super().__init__(core)
        self._body = body

    @property
    def ret_value(self) -> Any:
        """What the program's body returned. Raises what it raised; None inside of the body."""
        return None if self._body is None else self._bridge.result(self._body)

    def __getitem__(self, name: str) -> Any:
        """The value of `name`, once its call is done. KeyError at once for a name never queued."""
        return self._bridge.result(self._find(name).value)

    def meta(self, name: str) -> Any:
        """The RequestOutput behind `name` (a list for n > 1), or the ScoreResult of a select."""
        return self._bridge.result(self._find(name).meta)

    def get_var(self, name: str) -> Any:
        """SGLang's `s[name]`."""
        return self[name]

    def get_meta_info(self, name: str) -> MetaInfo | None:
        """SGLang's view of `meta(name)` as a dict; None for a name without a call."""
        return meta_info(self.meta(name), self._spell) if name in self else None

    def kv(self, name: str | None = None) -> KVReport:
        """What the call behind `name` kept and dropped of the KV cache; None: all calls of this
        state (since its fork) together.
        """
        if name is None:
            self.sync()
            return self.core.kv_report
        return kv_report_of(self.meta(name))

    def text(self) -> str:
        """All text so far, the author's and the generated."""
        self._finish()
        return self.core.text

    def token_ids(self) -> list[int]:
        """The state as tokens: just what the next request's prompt would be."""
        self._finish()
        return self.core.token_ids

    def messages(self) -> list[dict[str, str]]:
        """The closed chat messages, as {"role", "content"}."""
        self._finish()
        return self.core.messages

    def sync(self) -> None:
        """Wait until all that was appended has run. Raises nothing; see `error()`."""
        if self._body is not None:
            self._bridge.check_may_block()
            self._body.exception()
        self._bridge.result(self.core.barrier())

    def error(self) -> BaseException | None:
        """Wait, then what ended this state or its body, if anything did."""
        self.sync()
        body_error = None if self._body is None else self._body.exception()
        return body_error or self.core.error

    @contextlib.contextmanager
    def copy(self, *, kv: KVParams | None = None) -> "Generator[ProgramState]":
        """`with s.copy() as t:` a branch whose text does not stay; its values come back, each as a
        list of one.
        """
        branches = self.fork(1, kv=kv)
        yield branches[0]
        branches.join()

    def fork(
        self, num_branches: int = 1, *, kv: KVParams | None = None, budget: Budget | None = None
    ) -> Branches["ProgramState"]:
        """Branches that go on from here and share these exact tokens; `kv` bounds their calls.

        `budget` is for each of them; all spend from the budgets around the fork too.
        """
        cores = self.core.fork(num_branches, kv, budget)
        return Branches(self.core, [ProgramState(core) for core in cores])

    @contextlib.contextmanager
    def scratch(self) -> "Generator[ProgramState]":
        """`with s.scratch() as t:` what is appended to `t` goes on from here, and does not stay.

        The values of `t` are those of `s` afterwards, at once and without waiting. May be nested.

        >>> def program(s):
        ...     with s.scratch() as t:
        ...         t += "Think: " + zipage.gen("idea")
        ...     return s["idea"], s.text()
        >>> zipage.function(program).run(backend=zipage.testing.ScriptedBackend("hm")).ret_value
        ('hm', '')
        """
        with scratch_core(self.core) as core:
            yield ProgramState(core)

    def adopt(self, branch: "StateHandle") -> None:
        """Wait for a branch of this state, then append what it said, token by token, and take over
        its values. Raises the branch's error.
        """
        self._bridge.wait(adopted(self.core, core_to_adopt(branch)))

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Generated text as it comes: of `name`, or of all calls. A failure is raised in place."""
        return self._bridge.iterate(texts(self._texts, name))

    def text_async_iter(
        self, name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """`text_iter` for a reader on any event loop.

        With `return_meta_data` pairs of a piece and what is known of its call: its name, and the
        tokens drawn so far as "completion_tokens".
        """
        return self._bridge.iterate_async(pieces_of(self._texts, name, return_meta_data))

    @property
    def _texts(self) -> TextSource:
        return TextSource(self.core.deltas, self._when_known, self._when_all_done)

    @property
    def _bridge(self) -> LoopBridge:
        return self.core.session.bridge

    def _find(self, name: str) -> Variable:
        if self._body is None or self._body.done():
            if self._body is not None and name not in self:
                self._body.result()  # a body that raised says why the name is missing
            return self._known(name)
        found = self._bridge.result(self.core.variables.when_named(name))
        return found or self._find(name)

    def _finish(self) -> None:
        error = self.error()
        if error is not None:
            raise error

    async def _when_known(self, name: str) -> Variable:
        if self._body is not None and not self._body.done():
            await asyncio.wrap_future(self.core.variables.when_named(name))
        return self._find(name)

    async def _when_all_done(self) -> None:
        if self._body is not None:
            await asyncio.wrap_future(self._body)
        await self.core.drained()
