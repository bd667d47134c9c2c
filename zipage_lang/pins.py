"""`pin(prefix, ttl)`: keeps a prefix in the engine's cache between programs.

Knows nothing of programs' bodies, queues or budgets.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from zipage_lang.backend import Backend, as_backend, default_backend
from zipage_lang.errors import UnsupportedError
from zipage_lang.held_states import StateKeeper, new_id
from zipage_lang.loops import LoopBridge
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.state import StateHandle
from zipage_lang.state_core import StateCore

Prefix = str | Sequence[Mapping[str, str]] | StateHandle
MAX_TTL_S = 365 * 86400.0


def pin(prefix: Prefix, ttl: float = 300.0, *, backend: Any = None) -> "Pin":
    """Keep what begins with `prefix` warm for `ttl` seconds; each use begins them anew.

    Warm means: the engine holds the prefix's KV, so that no other request's text pushes it out, and
    calls that begin with it start from its end, the partly filled last block included. It is no
    claim to memory: where requests that run need its blocks, held states give way, the longest
    unused first. A pin that was given up is computed again when it is used in the second half of
    its time. Returns at once; `with` and `async with` wait until it is warm and release it.

    Parameters:
        prefix: text as a program would begin with it, chat messages, or a state.
        ttl: seconds after the last use.
        backend: where; None: the default backend (or the state's).

    Errors: ValueError for an empty prefix or a ttl that is not above zero; NoBackendError;
    UnsupportedError for a backend that can't hold states.

    >>> with zipage.pin("You are a judge.", backend=zipage.testing.StatefulBackend("yes")) as kept:
    ...     kept.is_warm
    True
    """
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= MAX_TTL_S:
        raise ValueError(f"ttl={ttl!r} must be seconds above zero")
    if not prefix:
        raise ValueError(f"prefix={prefix!r} is empty; there is nothing to keep")
    if isinstance(prefix, StateHandle):
        return Pin(prefix.core.session.settings.backend, prefix, ttl)
    return Pin(default_backend() if backend is None else as_backend(backend), prefix, ttl)


class Pin:
    """A prefix that is kept warm, as `pin` gives it.

    Parameters: those of `pin`.

    Errors: UnsupportedError for a backend that can't hold states. `wait` and `with` raise the
    engine's error where the prefix can't be computed.

    >>> kept = zipage.pin("You are a judge.", backend=zipage.testing.StatefulBackend())
    >>> kept.release()
    """

    def __init__(self, backend: Backend, prefix: Prefix, ttl_s: float) -> None:
        if not isinstance(backend, StateKeeper):
            raise UnsupportedError(backend, "pin", "only an engine of this process can hold states")
        self._keeper = cast("StateKeeper", backend)
        self._backend = cast("Backend", backend)
        self._bridge = LoopBridge(self._backend.loop)
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._token_ids: list[int] = []
        self._request_id: str | None = None  # of the state that is held
        self._held_since = 0.0
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_released = False
        self._work: asyncio.Task[None] | None = None
        self._bridge.call(self._start)

    @property
    def is_warm(self) -> bool:
        """Whether it was computed and has not been released; memory may have been short since."""
        return self._request_id is not None

    def wait(self) -> None:
        """Block until it is warm. Raises the engine's error where it can't be."""
        self._bridge.wait(self._warm())

    async def wait_async(self) -> None:
        """As `wait`, awaited on any loop."""
        await self._bridge.join(self._warm())

    def release(self) -> None:
        """Keep it no longer: the cache may evict it like anything else. May be called again."""
        if not self._bridge.loop.is_closed():
            self._bridge.call(self._release)

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        await self.wait_async()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.release()

    # On the loop.

    def _start(self) -> None:
        self._extend()
        self._work = self._bridge.loop.create_task(self._hold(None))

    async def _warm(self) -> None:
        while self._work is None:  # it was called from another thread and is on its way
            await asyncio.sleep(0)
        await asyncio.shield(self._work)

    async def _hold(self, parent_id: str | None) -> None:
        if not self._token_ids:
            self._token_ids = await self._tokens()
        request_id = new_id()
        await self._keeper.compute(
            self._token_ids,
            kv=KVParams(mode="off"),
            group_id="",
            request_id=request_id,
            parent_id=parent_id,
        )
        before, self._request_id = self._request_id, request_id
        self._held_since = self._bridge.loop.time()
        self._keeper.pins.add(request_id, self._token_ids, self._touch)
        if before is not None:
            self._drop(before)
        if self._is_released:
            self._release()

    async def _tokens(self) -> list[int]:
        if isinstance(self._prefix, StateHandle):
            core: StateCore = self._prefix.core
            await core.settled()
            return core.token_ids
        if isinstance(self._prefix, str):
            return list(self._backend.encode(self._prefix, add_special_tokens=True))
        text = self._backend.render_chat(list(self._prefix), add_generation_prompt=False)
        return list(self._backend.encode(text, add_special_tokens=False))

    def _touch(self) -> None:
        """It was used: its time begins anew, and so does its age among the held states."""
        self._extend()
        is_busy = self._work is None or not self._work.done()
        if not is_busy and self._bridge.loop.time() - self._held_since > self._ttl_s / 2:
            self._work = self._bridge.loop.create_task(self._hold(self._request_id))

    def _extend(self) -> None:
        self._deadline = self._bridge.loop.time() + self._ttl_s
        if self._timer is None:
            self._timer = self._bridge.loop.call_later(self._ttl_s, self._look_at_clock)

    def _look_at_clock(self) -> None:
        left = self._deadline - self._bridge.loop.time()
        if left > 0:
            self._timer = self._bridge.loop.call_later(left, self._look_at_clock)
        else:
            self._release()

    def _release(self) -> None:
        self._is_released = True
        if self._timer is not None:
            self._timer.cancel()
        request_id, self._request_id = self._request_id, None
        if request_id is not None:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._keeper.pins.remove(request_id)
        self._keeper.release([request_id])
