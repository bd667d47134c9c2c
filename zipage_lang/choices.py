"""How `select` and `score` decide: three pure functions of the choices' token log-probabilities.

Knows nothing of engines, how scores are computed, or states.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import get_args

from zipage_lang.ir import SelectMethod
from zipage_lang.runtime.messages import KVUsage


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """What `score` stores, and `s.meta(name)` holds for a select: all that is known of each choice.

    Lists go by choice. `scores` and `distribution` (their softmax) are those of `method`, and so
    are `index` and `choice`, the winner; `winners` names each method's. `logprobs[choice][token]`
    stand in context, `unconditional_logprobs` without (None: not asked for); `totals` and `means`
    are those in context, `probabilities` the softmax of the totals: how likely each is, given
    that one of them comes. `kv` is that of the scored context that lost most to compaction.

    Parameters: as above. Errors: none.

    >>> state = zipage.function(lambda s: s.append(zipage.score("c", ["a", "b"]))).run()
    >>> state["c"].choice, state["c"].is_exact
    ('a', True)
    """

    choices: tuple[str, ...]
    method: SelectMethod
    index: int
    scores: list[float]
    distribution: list[float]
    winners: dict[str, str]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    unconditional_logprobs: list[list[float]] | None
    kv: KVUsage

    @property
    def choice(self) -> str:
        """The winner of `method`."""
        return self.choices[self.index]

    @property
    def totals(self) -> list[float]:
        """Log-probability of each whole choice."""
        return [sum(row) for row in self.logprobs]

    @property
    def means(self) -> list[float]:
        """Mean log-probability of each choice's tokens."""
        return [_mean(row) for row in self.logprobs]

    @property
    def probabilities(self) -> list[float]:
        """Of each choice, given that one of them comes."""
        return _highest(self.totals).distribution

    @property
    def is_exact(self) -> bool:
        """Whether every choice was scored on the full KV cache; else on what compactions kept."""
        return self.kv.resident_len >= self.kv.logical_len


def all_winners(choices: Sequence[str], known: ChoiceScores) -> dict[str, str]:
    """Each method's winner, of the methods for which enough is known."""
    methods: tuple[SelectMethod, ...] = get_args(SelectMethod)
    return {
        method: choices[decide(method, known).index]
        for method in methods
        if method != "unconditional_likelihood_normalized" or known.unconditional is not None
    }


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

    Parameters:
        logprobs: by choice and token, in context.

    Errors: ValueError for no choices. The first of equal scores wins.

    >>> zipage.token_length_normalized([[-1.0], [-2.0]]).index
    0
    """
    return _highest([_mean(row) for row in logprobs])


def greedy_token_selection(logprobs: Sequence[Sequence[float]]) -> Selection:
    """Position by position keep the choices with the highest log-probability there.

    Shorter choices are padded with their own mean. A score is the number of positions survived.

    Parameters:
        logprobs: by choice and token, in context.

    Errors: ValueError for no choices. The first of equal scores wins.

    >>> zipage.greedy_token_selection([[-1.0], [-2.0]]).index
    0
    """
    longest = max((len(row) for row in logprobs), default=0)
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

    Parameters:
        logprobs: by choice and token, in context.
        unconditional: the same without context.

    Errors: ValueError for no choices. The first of equal scores wins.

    >>> zipage.unconditional_likelihood_normalized([[-1.0], [-2.0]], [[-0.5], [-3.0]]).index
    1
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
