"""A scripted backend that holds states as an engine does, and counts what it would have computed.

Knows nothing of the interpreter.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from zipage_lang.frontend.outputs import FINISH_ABORT, RequestOutput
from zipage_lang.frontend.pin_board import PinBoard
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.testing import ScriptedBackend


class StatefulBackend(ScriptedBackend):
    """A ScriptedBackend whose requests' states can be held and started from.

    `held` has the tokens of each state that is held, by request id. `num_computed_tokens` counts
    prompt tokens that no state had which the request started from; `num_drawn_tokens` the rest.

    Parameters and errors: as for ScriptedBackend.

    >>> backend = zipage.testing.StatefulBackend("yes")
    >>> zipage.function(lambda s: s.append("Is it? " + zipage.gen("a"))).run(backend=backend)["a"]
    'yes'
    """

    def __init__(self, script: Any = "", **options: Any) -> None:
        super().__init__(script, **options)
        self.pins = PinBoard()
        self.held: dict[str, list[int]] = {}
        self.max_held = 0
        self.num_computed_tokens = 0
        self.num_drawn_tokens = 0
        self.num_states_computed = 0  # forks and pins: requests that draw nothing

    async def generate_from(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv: KVParams,
        group_id: str,
        request_id: str,
        parent_id: str | None,
        hold: bool,
    ) -> AsyncGenerator[RequestOutput]:
        self._count(token_ids, parent_id)
        async for output in self.generate(token_ids, sampling, kv=kv, group_id=group_id):
            if output.is_final:
                self.num_drawn_tokens += len(output.token_ids)
                if hold and output.finish_reason != FINISH_ABORT:
                    self._hold(request_id, [*token_ids, *output.token_ids])
            yield output

    async def compute(
        self,
        token_ids: Sequence[int],
        *,
        kv: KVParams,
        group_id: str,
        request_id: str,
        parent_id: str | None,
    ) -> None:
        self.num_states_computed += 1
        self._count(token_ids, parent_id)
        self._hold(request_id, list(token_ids))

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.held.pop(request_id, None)

    def _count(self, token_ids: Sequence[int], parent_id: str | None) -> None:
        known = self.held.get(parent_id or "", [])
        num_known = 0
        while num_known < min(len(known), len(token_ids)) and (
            known[num_known] == token_ids[num_known]
        ):
            num_known += 1
        self.num_computed_tokens += len(token_ids) - num_known

    def _hold(self, request_id: str, token_ids: list[int]) -> None:
        self.held[request_id] = token_ids
        self.max_held = max(self.max_held, len(self.held))
