"""How `select` decides: three pure functions of the choices' token log-probabilities.

Knows nothing of engines, tokens' texts or states.
"""

import dataclasses
import math
from collections.abc import Sequence

from zipage_lang.ir import SelectMethod


@dataclasses.dataclass(frozen=True)
class ChoiceScores:
    """What is known of each choice: `logprobs[choice][token]` in context, and perhaps alone."""

    logprobs: list[list[float]]
    unconditional: list[list[float]] | None = None


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which choice won, each choice's score, and the scores as a distribution (their softmax)."""

    index: int
    scores: list[float]
    distribution: list[float]


def decide(method: SelectMethod, known: ChoiceScores) -> Selection:
    """Apply the method of that name; the first of equal scores wins."""
    match method:
        case "token_length_normalized":
            return token_length_normalized(known.logprobs)
        case "greedy_token_selection":
            return greedy_token_selection(known.logprobs)
        case "unconditional_likelihood_normalized":
            assert known.unconditional is not None, "this method needs unconditional scores"
            return unconditional_likelihood_normalized(known.logprobs, known.unconditional)


def token_length_normalized(logprobs: Sequence[Sequence[float]]) -> Selection:
    """The highest mean log-probability over the choice's tokens.

    A long choice whose later tokens are certain is favoured.
    """
    return _highest([_mean(row) for row in logprobs])


def greedy_token_selection(logprobs: Sequence[Sequence[float]]) -> Selection:
    """Position by position keep the choices with the highest log-probability there.

    Shorter choices are padded with their own mean. A score is the number of positions survived.
    """
    longest = max(len(row) for row in logprobs)
    padded = [[*row, *[_mean(row)] * (longest - len(row))] for row in logprobs]
    survived = [0] * len(padded)
    alive = list(range(len(padded)))
    for position in range(longest):
        best = max(padded[index][position] for index in alive)
        alive = [index for index in alive if padded[index][position] == best]
        for index in alive:
            survived[index] += 1
    return _highest([float(count) for count in survived])


def unconditional_likelihood_normalized(
    logprobs: Sequence[Sequence[float]], unconditional: Sequence[Sequence[float]]
) -> Selection:
    """The highest mean of (log-probability in context - log-probability without context).

    A first token has no value without context; it counts as 0 there.
    """
    gains = [
        [inside - alone for inside, alone in zip(row, base, strict=True)]
        for row, base in zip(logprobs, unconditional, strict=True)
    ]
    return _highest([_mean(row) for row in gains])


def _mean(row: Sequence[float]) -> float:
    return sum(row) / len(row)


def _highest(scores: list[float]) -> Selection:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return Selection(
        index=scores.index(top),
        scores=scores,
        distribution=[weight / total for weight in weights],
    )
