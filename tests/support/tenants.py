"""Loads of several tenants for the scheduler simulation, and what each of them was given.

Knows nothing of how the scheduler shares.
"""

import zlib
from collections.abc import Iterable, Sequence

import msgspec
from test_support.simulation import Simulation, World

from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams


def tenant_request(
    tenant: str, index: int, *, prompt_len: int = 4, max_tokens: int = 4, n: int = 1
) -> AddRequest:
    """The tenant's request of that number: a prompt of its own, and as many tokens as it may."""
    name = f"{tenant}-{index}"
    seed = zlib.crc32(name.encode())
    return AddRequest(
        request_id=name,
        token_ids=[(seed >> place % 24) % 50 for place in range(prompt_len)],
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, n=n),
        tenant=tenant,
    )


class TenantSimulation(Simulation):
    """A simulation that counts what each tenant was given, from outside: by outputs and plans."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.order_admitted: list[str] = []  # request ids by their first token
        self.order_ended: list[str] = []

    def service(self, tenant: str) -> int:
        """Tokens: prompts of those that began, and all that was drawn."""
        return sum(
            len(transcript.token_ids) + (index == 0) * len(transcript.request.token_ids)
            for (_, index), transcript in self.transcripts.items()
            if transcript.request.tenant == tenant and transcript.token_ids
        )

    def num_waiting(self, tenant: str) -> int:
        """Requests that have told no token yet."""
        return sum(
            transcript.request.tenant == tenant and not transcript.token_ids
            for transcript in self.transcripts.values()
        )

    def receive(self):  # type: ignore[no-untyped-def]
        began = {key for key, transcript in self.transcripts.items() if transcript.token_ids}
        outputs = super().receive()
        for output in outputs:
            key = (output.request_id, output.sample_index)
            if output.token_ids and key not in began:
                began.add(key)
                self.order_admitted.append(output.request_id)
            if output.is_final:
                self.order_ended.append(output.request_id)
        return outputs


class TenantsByName(Simulation):
    """Any load, its requests given to some tenants by their names."""

    def __init__(self, world: World, tenants: Sequence[str]) -> None:
        super().__init__(world)
        self._tenants = tenants

    def add(self, request: AddRequest) -> None:
        super().add(self._given(request))

    def fork(self, parent_id: str, children: Sequence[AddRequest]) -> None:
        super().fork(parent_id, [self._given(child) for child in children])

    def _given(self, request: AddRequest) -> AddRequest:
        number = zlib.crc32(request.request_id.encode()) % len(self._tenants)
        return msgspec.structs.replace(request, tenant=self._tenants[number])


def largest_gap(services: Iterable[tuple[int, int]]) -> int:
    """How far two running totals ever drew apart over any stretch of the given history."""
    gaps = [ours - theirs for ours, theirs in services]
    return max(gaps, default=0) - min(gaps, default=0)
