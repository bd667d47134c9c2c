"""A call under an id that another call has in use is refused, and takes nothing from the other."""

import asyncio

import pytest

from zipage_lang.server.held_states import HeldStates

FORMS = [{}, {"stream": True}, {"stream": True, "stream_format": "delta"}]


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_a_call_that_came_twice_leaves_the_first_ones_state_held(with_app, script, first, second):
    """As when a proxy sends it again: what the first one holds is for its owner to let go of."""
    ask = {"input_ids": [script.SLOW, 30], "rid": "a", "hold": True}
    ask["sampling_params"] = {"max_tokens": 100}

    async def use(app):
        num_leases = app.service.tables["held_leases"]
        running = asyncio.create_task(app.post("/generate", {**ask, **first}))
        while not app.service.records:
            await asyncio.sleep(0.001)
        again = await app.post("/generate", {**ask, **second})
        is_over = running.done()
        await running
        held = num_leases(), (await app.service.llm.stats()).get("Release", 0)
        await app.post("/release", {"request_ids": ["a"]})
        return again, is_over, held, num_leases()

    again, is_over, held, num_after = with_app(use)
    assert "'a' is in use" in again.text
    assert not is_over
    assert held == (1, 0)
    assert num_after == 0


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_a_call_that_comes_again_afterwards_leaves_the_state_and_its_lease(
    with_app, script, first, second
):
    ask = {"input_ids": [30], "rid": "a", "hold": True, "sampling_params": {"max_tokens": 3}}
    twice = {**ask, "input_ids": [script.REFUSE, 30]}  # as an engine that holds "a" would

    async def use(app):
        num_leases = app.service.tables["held_leases"]
        await app.post("/generate", {**ask, **first})
        before = num_leases()
        again = await app.post("/generate", {**twice, **second})
        held = before, num_leases(), (await app.service.llm.stats()).get("Release", 0)
        await app.post("/release", {"request_ids": ["a"]})
        return again, held, num_leases()

    again, held, num_after = with_app(use)
    assert "error" in again.text
    assert held == (1, 1, 0)
    assert num_after == 0


def test_a_lease_begins_again_with_a_state_of_the_same_name():
    """The engine let go of the first one for want of memory, so the second was taken."""

    async def work():
        released = []
        held = HeldStates(released.extend, lease_s=60)
        held.begin(held.expect(["a"]))
        new = held.expect(["a"])
        held.begin(["a"])
        return new, released, len(held)

    assert asyncio.run(work()) == ([], [], 1)


def test_only_who_expected_a_state_first_begins_its_lease():
    async def work():
        released = []
        held = HeldStates(released.extend, lease_s=60)
        first, second = held.expect(["a", "b"]), held.expect(["b", "c"])
        held.forget(["c"])
        held.begin(second)
        sizes = [len(held)]
        held.begin(first)
        sizes.append(len(held))
        held.forget("abc")
        return first, second, released, sizes, len(held)

    first, second, released, sizes, num_left = asyncio.run(work())
    assert (first, second) == (["a", "b"], ["c"])
    assert released == ["c"]
    assert sizes == [2, 2]
    assert num_left == 0
