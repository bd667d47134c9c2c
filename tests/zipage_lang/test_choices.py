import math

import pytest

from zipage_lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

LONG_BUT_CERTAIN = [-1.0, -0.1, -0.1]
SHORT = [-0.5]


def test_token_length_normalized_prefers_the_long_choice_with_certain_ends():
    assert token_length_normalized([LONG_BUT_CERTAIN, SHORT]).index == 0


def test_greedy_token_selection_prefers_the_better_first_token():
    assert greedy_token_selection([LONG_BUT_CERTAIN, SHORT]).index == 1


def test_greedy_token_selection_pads_short_choices_with_their_mean():
    # Equal first tokens; at the second the short one stands with its mean -1, above -2.
    assert greedy_token_selection([[-1.0, -2.0], [-1.0]]).index == 1
    assert greedy_token_selection([[-1.0, -0.5], [-1.0]]).index == 0


def test_unconditional_likelihood_takes_off_what_is_likely_anyway():
    in_context = [[-1.0], [-1.5]]
    alone = [[-1.0], [-6.0]]
    assert token_length_normalized(in_context).index == 0
    chosen = unconditional_likelihood_normalized(in_context, alone)
    assert chosen.index == 1
    assert chosen.scores == [0.0, 4.5]


@pytest.mark.parametrize("method", [token_length_normalized, greedy_token_selection])
def test_first_of_equal_choices_wins(method):
    assert method([[-1.0], [-1.0], [-1.0]]).index == 0


def test_distribution_is_the_softmax_of_the_scores():
    chosen = token_length_normalized([[-1.0], [-2.0]])
    assert math.isclose(sum(chosen.distribution), 1.0)
    assert math.isclose(chosen.distribution[0] / chosen.distribution[1], math.e)
