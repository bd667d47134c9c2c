"""pass@k, majority and intervals against what enumeration gives."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.evaluation.statistics import (
    difference_interval,
    majority,
    mean_interval,
    pass_at_k,
    percentile,
    ratio_interval,
)


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples):
    for num_correct in range(num_samples + 1):
        is_correct = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(is_correct, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_a_k_that_the_samples_do_not_hold(k):
    with pytest.raises(ValueError, match=f"pass@{k} needs 1 to 4"):
        pass_at_k(4, 1, k)


@pytest.mark.parametrize(
    ("answers", "is_correct", "expected"),
    [
        (["a", "a", "b"], [True, True, False], 1.0),
        (["a", "a", "b"], [False, False, True], 0.0),
        (["a", "b"], [True, False], 0.5),
        (["a", "b", "c"], [False, False, True], 1 / 3),
        (["a", "a", "b", "b", "c"], [True, True, False, False, False], 0.5),
        (["a", None, None], [True, False, False], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_majority_is_the_commonest_answer_and_ties_share(answers, is_correct, expected):
    assert majority(answers, is_correct) == pytest.approx(expected)


def test_the_interval_of_a_mean_is_that_of_resampled_problems():
    rng = random.Random(5)
    values = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(60)]
    means = sorted(statistics.fmean(rng.choices(values, k=60)) for _ in range(4000))
    found = mean_interval(values)
    assert found.value == pytest.approx(statistics.fmean(values))
    assert found.low == pytest.approx(means[100], abs=0.012)
    assert found.high == pytest.approx(means[3899], abs=0.012)


def test_a_paired_difference_is_narrower_than_its_parts():
    rng = random.Random(1)
    base = [rng.random() for _ in range(80)]
    values = [value - 0.1 for value in base]
    found = difference_interval(values, base)
    assert (found.low, found.value, found.high) == pytest.approx((-0.1, -0.1, -0.1))


def test_a_ratio_resamples_both_sides_together():
    base = [1.0, 2.0, 3.0, 4.0]
    found = ratio_interval([2 * value for value in base], base)
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio_interval([1.0, 1.0], [0.0, 0.0]) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_an_interval_lies_within_the_values_and_around_the_mean(values):
    found = mean_interval(values)
    slack = 1e-9
    assert min(values) - slack <= found.low <= found.value + slack
    assert found.value - slack <= found.high <= max(values) + slack


def test_a_percentile_lies_between_neighbours_in_proportion():
    assert percentile([10, 20, 30, 40, 50], 0.95) == pytest.approx(48.0)
    assert percentile([7], 0.95) == 7
