"""The text that one state generates, piece by piece as it comes, for one reader.

Knows nothing of how states run, or of which thread the reader is in.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from zipage_lang.stream import Delta, DeltaLog, read_logs
from zipage_lang.variables import Variable


@dataclasses.dataclass(frozen=True)
class TextSource:
    """What a reader needs of a state.

    `find` gives a name's variable once the body has queued it, and raises KeyError where it never
    will; `end` is over when the state is, and raises its error.
    """

    log: DeltaLog
    find: Callable[[str], Coroutine[Any, Any, Variable]]
    end: Callable[[], Coroutine[Any, Any, None]]


def pieces_of(
    source: TextSource, name: str | None, return_meta_data: bool
) -> AsyncGenerator[Any, None]:
    """Texts, or pairs of a text and what is known of its call."""
    return _pairs(source, name) if return_meta_data else texts(source, name)


async def texts(source: TextSource, name: str | None) -> AsyncGenerator[str, None]:
    """The text of `name`'s call, or of all calls. Runs on the loop."""
    async with contextlib.aclosing(_deltas(source, name)) as deltas:
        async for delta in deltas:
            yield delta.text


async def _pairs(
    source: TextSource, name: str | None
) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    num_drawn: Counter[int] = Counter()
    async with contextlib.aclosing(_deltas(source, name)) as deltas:
        async for delta in deltas:
            num_drawn[delta.call_index] += delta.num_tokens
            told = {"name": delta.name, "completion_tokens": num_drawn[delta.call_index]}
            yield delta.text, told


def _deltas(source: TextSource, name: str | None) -> AsyncGenerator[Delta, None]:
    return _all_deltas(source) if name is None else _deltas_of(source, name)


async def _all_deltas(source: TextSource) -> AsyncGenerator[Delta, None]:
    async with contextlib.aclosing(read_logs([source.log], source.end())) as items:
        async for _, delta in items:
            if delta.text and delta.sample_index == 0:
                yield delta


async def _deltas_of(source: TextSource, name: str) -> AsyncGenerator[Delta, None]:
    variable = await source.find(name)
    call = (name, variable.call_index, 0)
    has_streamed = False
    async with contextlib.aclosing(read_logs([source.log], _value_of(variable))) as items:
        async for _, delta in items:
            if delta.text and (delta.name, delta.call_index, delta.sample_index) == call:
                has_streamed = True
                yield delta
    if not has_streamed:  # assigned, or generated before this branch was forked
        value = variable.value.result()
        if value:
            text = str(value[0] if isinstance(value, list) else value)
            yield Delta(name, text, 0, variable.call_index)


async def _value_of(variable: Variable) -> None:
    await asyncio.wrap_future(variable.value)
