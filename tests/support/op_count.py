"""Counts what a piece of code does in calls, so that a claim about growth needs no quiet machine.

Knows nothing of what is counted.
"""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any


def num_calls(act: Callable[[], Any]) -> int:
    """Calls of Python and C functions while `act` runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def num_bytes(make: Callable[[], Any]) -> int:
    """Bytes that what `make` returns keeps alive."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        del made
    finally:
        tracemalloc.stop()
    return after - before
