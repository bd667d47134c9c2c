"""Leases of held states: none is left of who was released, however early."""

import asyncio

import pytest

from zipage_lang.server.held_states import HeldStates


@pytest.mark.parametrize("releases_first", [False, True])
def test_a_release_leaves_no_lease_whichever_comes_first(releases_first):
    async def play():
        released = []
        held = HeldStates(released.extend)
        held.expect(["r"])
        assert len(held) == 1
        for act in (held.forget, held.begin) if releases_first else (held.begin, held.forget):
            act(["r"])
        return released, len(held)

    assert asyncio.run(play()) == (["r"] if releases_first else [], 0)


def test_who_never_releases_is_let_go_when_the_lease_ends():
    async def play():
        released = []
        held = HeldStates(released.extend, lease_s=0.0)
        held.expect(["r"])
        held.begin(["r"])
        await asyncio.sleep(0.05)
        return released, len(held)

    assert asyncio.run(play()) == (["r"], 0)
