"""Which state in the engine each program state goes on from.

A state's last request is held in the engine, so its next one continues from it: down to the partly
filled last block, and safe from eviction in between. Branches of one fork start from one request
that computes the parent's text once, when the first of them needs it.
Knows nothing of expressions, budgets or text.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, cast

from zipage_lang.frontend.errors import ZipageError
from zipage_lang.frontend.outputs import FINISH_ABORT, RequestOutput
from zipage_lang.held_states import HeldState, HeldStates, new_id
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams

MAX_LAG = 16  # tokens; a held state no further behind has more than the tree's whole blocks
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class ForkState:
    """The state that the branches of one fork start from; each leaves it after its first call."""

    def __init__(
        self,
        held: HeldStates,
        spawn: Spawn,
        token_ids: list[int],
        parent: HeldState | None,
        num_branches: int,
    ) -> None:
        self._held = held
        self._spawn = spawn
        self._token_ids = token_ids
        self._parent = parent.hold() if parent is not None else None
        self._num_branches = num_branches
        self._ready: asyncio.Future[HeldState | None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._num_waiting = 0

    async def state(self, kv: KVParams) -> HeldState | None:
        """Compute it when the first branch asks; None where the engine would not."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._task = self._spawn(self._compute(self._ready, kv))
        ready = self._ready
        self._num_waiting += 1
        try:
            return await asyncio.shield(ready)
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0 and not ready.done():
                self._stop()

    def leave(self) -> None:
        """One branch needs it no more."""
        self._num_branches -= 1
        if self._num_branches > 0:
            return
        self._drop_parent()
        if self._ready is not None:
            self._ready.add_done_callback(_drop_result)
            self._stop()

    def _stop(self) -> None:
        """Nobody waits for it: abort what computes it. Who comes later begins anew."""
        if self._task is not None:
            self._task.cancel()  # does nothing once it is done
        self._ready = None

    async def _compute(self, ready: "asyncio.Future[HeldState | None]", kv: KVParams) -> None:
        request_id = new_id()
        state: HeldState | None = None
        if kv.protected_len is not None and kv.protected_len > len(self._token_ids):
            kv = dataclasses.replace(kv, protected_len=len(self._token_ids))
        try:
            await self._held.keeper.compute(
                self._token_ids,
                kv=kv,
                group_id=self._held.group_id,
                request_id=request_id,
                parent_id=self._held.parent_id(self._parent, self._token_ids),
            )
            state = self._held.new(request_id, len(self._token_ids))
        except (ZipageError, ValueError):
            state = None  # the branches' own calls will say why
        finally:
            if state is not None:
                self._drop_parent()
            ready.set_result(state)

    def _drop_parent(self) -> None:
        parent, self._parent = self._parent, None
        if parent is not None:
            parent.drop()


class Lineage:
    """One state's place in the engine: what its next request continues from."""

    def __init__(self, held: HeldStates) -> None:
        self._held = held
        self._state: HeldState | None = None
        self._fork: ForkState | None = None

    def start_at(self, fork: ForkState) -> None:
        """This is a branch: its first request starts where the fork was."""
        self._fork = fork

    def fork_state(self, spawn: Spawn, token_ids: list[int], num_branches: int) -> ForkState:
        """Where `num_branches` branches of this state start from, after `token_ids`."""
        return ForkState(self._held, spawn, token_ids, self._state, num_branches)

    def take_over(self, other: "Lineage") -> None:
        """This state now says what `other` said: go on from where that one ended."""
        if other._state is not None:
            self._move_to(other._state.hold())

    @property
    def holds(self) -> bool:
        """Whether anything in the engine waits for this state."""
        return self._state is not None or self._fork is not None

    def release(self) -> None:
        """Hold nothing more. The state can go on; it finds again what the cache still has."""
        self._move_to(None)

    async def stream(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv: KVParams,
        group_id: str,
        holds: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs; with `holds` its state is kept for the next one."""
        parent = await self._parent(kv)
        request_id = new_id()
        stream = self._held.keeper.generate_from(
            token_ids,
            sampling,
            kv=kv,
            group_id=group_id,
            request_id=request_id,
            parent_id=self._held.parent_id(parent, token_ids),
            hold=holds,
        )
        is_first = True
        stream = cast("AsyncGenerator[RequestOutput, None]", stream)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                if is_first and holds:
                    self._move_to(None)  # the engine has started from the parent by now
                is_first = False
                if output.is_final:
                    self._note_end(output, token_ids, request_id, parent, holds)
                yield output

    def _note_end(
        self,
        output: RequestOutput,
        token_ids: Sequence[int],
        request_id: str,
        parent: HeldState | None,
        holds: bool,
    ) -> None:
        num_tokens = len(token_ids) + len(output.token_ids)
        if holds and output.finish_reason != FINISH_ABORT:
            self._move_to(self._held.new(request_id, num_tokens))
        elif parent is not None and num_tokens - parent.num_tokens > MAX_LAG:
            self._move_to(None)  # what this request left in the tree is longer

    async def _parent(self, kv: KVParams) -> HeldState | None:
        return self._state if self._fork is None else await self._fork.state(kv)

    def _move_to(self, state: HeldState | None) -> None:
        before, self._state = self._state, state
        fork, self._fork = self._fork, None
        if before is not None:
            before.drop()
        if fork is not None:
            fork.leave()


def _drop_result(ready: "asyncio.Future[HeldState | None]") -> None:
    state = None if ready.cancelled() else ready.result()
    if state is not None:
        state.drop()
