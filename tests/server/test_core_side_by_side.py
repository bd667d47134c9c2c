"""Streams merged and work gathered: order, errors, and who is closed."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.server.side_by_side import gathered, merged


class Source:
    """Streams that count how many of them are open."""

    def __init__(self):
        self.num_open = 0

    async def stream(self, items):
        self.num_open += 1
        try:
            for item in items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.num_open -= 1


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4))
def test_every_streams_items_arrive_in_its_own_order(lists):
    async def work():
        source = Source()
        seen = [item async for item in merged([source.stream(items) for items in lists])]
        return seen, source.num_open

    seen, num_open = asyncio.run(work())
    for place, items in enumerate(lists):
        assert [item for origin, item in seen if origin == place] == items
    assert num_open == 0


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_first_error_ends_all_streams(num_streams):
    async def work():
        source = Source()
        lists = [[1, KeyError("mine"), 2], *[[3] * 10**6] * (num_streams - 1)]
        with pytest.raises(KeyError, match="mine"):
            async for _ in merged([source.stream(items) for items in lists]):
                pass
        return source.num_open

    assert asyncio.run(work()) == 0


@pytest.mark.parametrize("num_streams", [1, 3])
def test_who_closes_the_whole_closes_all_streams(num_streams):
    async def work():
        source = Source()
        whole = merged([source.stream([1] * 10**6) for _ in range(num_streams)])
        await anext(whole)
        num_before = source.num_open
        await whole.aclose()
        return num_before, source.num_open

    assert asyncio.run(work()) == (num_streams, 0)


def test_results_are_gathered_in_order_and_an_error_cancels_the_rest():
    ended = []

    async def later(seconds, result):
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(result)
        if isinstance(result, Exception):
            raise result
        return result

    assert asyncio.run(gathered([later(0.02, "a"), later(0.0, "b")])) == ["a", "b"]
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(gathered([later(60, "c"), later(0.0, KeyError("mine"))]))
    assert "c" in ended
