"""How long the device was busy with steps, idle between them, and busy with compactions.

Read from events that are recorded anyway to order the work; nothing waits for them.
Knows nothing of what the work was.
"""

import dataclasses

import torch

Span = tuple[torch.cuda.Event, torch.cuda.Event]  # start and end, both with timing


@dataclasses.dataclass(slots=True)
class DeviceClock:
    """Sums in seconds. Spans must be told in order, when they are over."""

    busy_s: float = 0.0
    idle_s: float = 0.0
    _last_end: torch.cuda.Event | None = None

    def add(self, span: Span) -> None:
        """Count a span that is over, and the gap since the one before it."""
        start, end = span
        self.busy_s += start.elapsed_time(end) / 1e3
        if self._last_end is not None:
            self.idle_s += max(0.0, self._last_end.elapsed_time(start) / 1e3)
        self._last_end = end

    def forget_last(self) -> None:
        """The engine was out of work: the gap that follows is not idle time."""
        self._last_end = None


def timed_event(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """An event with timing, recorded now on the stream (the current one by default)."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or torch.cuda.current_stream())
    return event
