"""Who reads slowly holds up its own streams, and what waits for it stays bounded."""

import asyncio

import pytest

from zipage_lang.server.side_by_side import MAX_AHEAD, merged

TURNS = 2000  # of the loop, in which each stream would give as many items


class Source:
    """Streams without an end that count what is taken from them."""

    def __init__(self):
        self.num_taken = 0
        self.num_open = 0

    async def stream(self):
        self.num_open += 1
        try:
            while True:
                await asyncio.sleep(0)
                self.num_taken += 1
                yield self.num_taken
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("num_streams", [1, 2, 9])
def test_streams_do_not_run_ahead_of_who_reads_them(num_streams):
    async def work():
        source = Source()
        whole = merged([source.stream() for _ in range(num_streams)])
        seen = [await anext(whole)]
        for _ in range(TURNS):
            await asyncio.sleep(0)
        num_ahead = source.num_taken - len(seen)
        seen += [await anext(whole) for _ in range(TURNS)]
        await whole.aclose()
        return num_ahead, seen, source.num_open

    num_ahead, seen, num_open = asyncio.run(work())
    assert num_ahead <= MAX_AHEAD + num_streams
    assert len(set(seen)) == len(seen) == TURNS + 1
    assert num_open == 0


@pytest.mark.parametrize("ends_with_error", [False, True])
def test_what_waited_for_its_turn_still_arrives(ends_with_error):
    """More items than may wait, an end behind them, and a reader that comes late."""
    num_items = 3 * MAX_AHEAD

    async def stream(place):
        for item in range(num_items):
            yield item
        if ends_with_error and place == 1:
            raise KeyError("mine")

    async def work():
        seen = {0: [], 1: []}
        try:
            async for place, item in merged([stream(0), stream(1)]):
                seen[place].append(item)
                await asyncio.sleep(0)
        except KeyError as error:
            return seen, error
        return seen, None

    seen, error = asyncio.run(work())
    assert seen[1] == list(range(num_items))
    assert seen[0] == list(range(len(seen[0])))
    if ends_with_error:
        assert error is not None
    else:
        assert len(seen[0]) == num_items
