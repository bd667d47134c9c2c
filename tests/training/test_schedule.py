"""Progress reaches its end when the time does, and the rate falls to nothing there."""

import itertools

import pytest
from mixture import Mixture
from schedule import CountedProgress, TimedProgress, rate_factor

CELLS = [("a", 0), ("a", 1), ("a", 2), ("b", 0)]


def test_timed_progress_goes_from_the_last_piece_to_its_own_end():
    now = [100.0]
    progress = TimedProgress(0.4, 0.9, deadline=300.0, clock=lambda: now[0])
    now[0] = 200.0  # compiling took 100 s
    progress.start()
    assert progress.now(0) == 0.4
    now[0] = 250.0
    assert progress.now(7) == pytest.approx(0.65)
    now[0] = 301.0
    assert progress.now(9) == pytest.approx(progress.until)


def test_a_piece_that_starts_past_its_deadline_is_over_at_once():
    now = [10.0]
    progress = TimedProgress(0.5, 1.0, deadline=5.0, clock=lambda: now[0])
    progress.start()
    now[0] = 10.1
    assert progress.now(0) == 1.0


def test_counted_progress_does_not_depend_on_the_piece():
    assert (
        CountedProgress(200, until=0.5).now(50) == CountedProgress(200, until=1.0).now(50) == 0.25
    )


def test_the_rate_rises_stays_and_falls_to_nothing():
    factors = [rate_factor(step / 1000) for step in range(1001)]
    assert factors[0] == factors[-1] == 0
    assert factors[10:451] == [1.0] * 441
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[451:]))


def test_easy_levels_come_first_and_families_stay_even():
    mixture = Mixture(CELLS)
    early, late = mixture.weights(0.0), mixture.weights(0.5)
    assert sum(early) == pytest.approx(1)
    assert early[0] > 4 * early[1] > 16 * early[2]
    assert late == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_what_is_got_wrong_comes_more_often_and_what_is_right_still_comes():
    mixture = Mixture(CELLS)
    for _ in range(20):
        mixture.observe([1.0, 0.5, 0.0, 1.0])
    weights = mixture.weights(0.5)
    assert weights[2] > weights[1] > weights[0] > 0.05
    assert weights[3] == pytest.approx(3 * weights[0])
