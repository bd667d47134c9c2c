"""Requests' states that a run keeps in the engine, each as long as somebody here holds it.

Knows nothing of program states, forks or budgets.
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.frontend.pin_board import PinBoard
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams


@runtime_checkable
class StateKeeper(Protocol):
    """What a backend has that can keep a request's state and start others from it."""

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
        """As Backend.generate, from the state of `parent_id` as far as the tokens are the same.

        With `hold` the state is kept after the end, until `release` or until memory is short. A
        parent that is gone is no error.
        """

    async def compute(
        self,
        token_ids: Sequence[int],
        *,
        kv: KVParams,
        group_id: str,
        request_id: str,
        parent_id: str | None,
    ) -> None:
        """Compute these tokens, draw none that counts, and hold the state.

        Cancelling it aborts the request.
        """

    def release(self, request_ids: Sequence[str]) -> None:
        """Drop held states. Ids that are not known are no error."""

    @property
    def pins(self) -> PinBoard:
        """The prefixes that are kept warm there."""


class HeldStates:
    """All that one run holds in the engine. Used on the loop only."""

    def __init__(self, keeper: StateKeeper, group_id: str) -> None:
        self.keeper = keeper
        self.group_id = group_id
        self._ids: set[str] = set()
        self._is_over = False

    def new(self, request_id: str, num_tokens: int) -> "HeldState":
        state = HeldState(self, request_id, num_tokens)
        self._ids.add(request_id)
        if self._is_over:
            state.drop()
        return state

    def parent_id(self, state: "HeldState | None", token_ids: Sequence[int]) -> str | None:
        """What a request of these tokens starts from: this state, else a pinned prefix."""
        return self.keeper.pins.find(token_ids) if state is None else state.request_id

    def release(self, request_id: str) -> None:
        if request_id in self._ids:
            self._ids.discard(request_id)
            self.keeper.release([request_id])

    def end(self) -> None:
        """The run is over: nothing is kept from now on."""
        self._is_over = True
        ids, self._ids = self._ids, set()
        if ids:
            self.keeper.release(sorted(ids))


class HeldState:
    """One request's state, kept in the engine while somebody here holds it."""

    def __init__(self, held: HeldStates, request_id: str, num_tokens: int) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self._held = held
        self._num_holders = 1

    def hold(self) -> "HeldState":
        self._num_holders += 1
        return self

    def drop(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0:
            self._held.release(self.request_id)


def new_id() -> str:
    """An id that no other request has, in any process."""
    return uuid.uuid4().hex


def find_held_states(backend: Any, group_id: str) -> HeldStates | None:
    """Where a run's states are held; None for a backend that can keep none."""
    return HeldStates(backend, group_id) if isinstance(backend, StateKeeper) else None
