"""Busy and idle time of a device, from stand-ins for its events. Knows nothing of engines."""

import pytest

from zipage_lang.runtime.device_clock import DeviceClock


class At:
    """An event at a time, in milliseconds."""

    def __init__(self, at_ms):
        self.at_ms = at_ms

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def test_spans_are_busy_and_gaps_between_them_idle():
    clock = DeviceClock()
    for start, end in ((0, 10), (12, 20), (20, 21)):
        clock.add((At(start), At(end)))
    assert clock.busy_s == pytest.approx(0.019)
    assert clock.idle_s == pytest.approx(0.002)


def test_time_without_work_is_not_idle_time():
    clock = DeviceClock()
    clock.add((At(0), At(10)))
    clock.forget_last()
    clock.add((At(5_000), At(5_010)))
    assert (clock.busy_s, clock.idle_s) == (pytest.approx(0.02), 0.0)
