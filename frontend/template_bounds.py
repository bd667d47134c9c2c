"""Bounds what a chat template may take while it renders: it comes with the model, and it is code.

Jinja's sandbox keeps a template from files, modules and changes to what it is given, but not from
running for ever. Memory is not bounded here: one expression may build a text of any length.
Knows nothing of messages or of what templates write.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

MAX_CPU_S = 10.0  # of the thread that renders
MAX_TEXT_LEN = 2**26  # characters; a request's body has less
TEMPLATE_FILE = "<template>"  # what Jinja calls the code that it compiles from a text
LINES_PER_LOOK = 1000  # between two looks at the clock


@contextlib.contextmanager
def bounded_rendering(max_cpu_s: float | None = None) -> Iterator[None]:
    """Templates that run inside have `max_cpu_s` of this thread's time (None: MAX_CPU_S).

    Raises ValueError in the middle of one that takes longer.
    """
    limit_s = MAX_CPU_S if max_cpu_s is None else max_cpu_s
    ends_at = time.thread_time() + limit_s
    num_lines = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += 1
        if num_lines % LINES_PER_LOOK == 0 and time.thread_time() > ends_at:
            raise ValueError(f"it ran for more than {limit_s:g} s")
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename == TEMPLATE_FILE else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def check_text(text: str) -> str:
    """The text a template wrote. Raises ValueError for one that is absurdly long."""
    if len(text) > MAX_TEXT_LEN:
        raise ValueError(f"it wrote {len(text)} characters, more than {MAX_TEXT_LEN}")
    return text
