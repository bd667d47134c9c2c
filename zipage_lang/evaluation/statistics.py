"""Statistics of repeated samples: pass@k, majority@k, means, and bootstrap intervals over problems.

Knows nothing of engines, checkers or files.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
SEED = 20_261_129  # one set of resamples for all cells, so that differences are paired

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its bootstrap percentile interval."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is right, 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., arXiv 2107.03374, equation 1. Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs 1 to {num_samples} of {num_samples} samples")
    missed = math.comb(num_samples - num_correct, k)
    return 1.0 - missed / math.comb(num_samples, k)


def majority(answers: Sequence[str | None], is_correct: Sequence[bool]) -> float:
    """Whether the commonest answer is right; of answers that tie, the share that is.

    Samples without an answer (None) have no vote; without any vote it is wrong.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, num_votes in votes.items() if num_votes == most}
    pairs = zip(answers, is_correct, strict=True)
    right = {answer for answer, correct in pairs if correct and answer in winners}
    return len(right) / len(winners)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of one value per problem; the interval resamples problems."""
    array = np.asarray(values, dtype=np.float64)  # [num_problems]
    means = _resampled_means(array[None])[0]  # [num_resamples]
    return _interval(float(array.mean()), means)


def difference_interval(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Mean of values - base, problem by problem (paired)."""
    pairs = np.asarray([values, base], dtype=np.float64)  # [2, num_problems]
    return mean_interval((pairs[0] - pairs[1]).tolist())


def ratio_interval(values: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Mean of values over mean of base, resampled together; None where the base's mean is 0."""
    pairs = np.asarray([values, base], dtype=np.float64)  # [2, num_problems]
    if pairs[1].mean() == 0.0:
        return None
    means = _resampled_means(pairs)  # [2, num_resamples]
    usable = means[:, means[1] > 0.0]  # [2, num_usable]
    return _interval(float(pairs[0].mean() / pairs[1].mean()), usable[0] / usable[1])


def percentile(values: Sequence[float], share: float) -> float:
    """The value at `share` (0 to 1) of the sorted values, between neighbours in proportion."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def _resampled_means(rows: Floats) -> Floats:
    """rows: [num_rows, num_problems]; the same problems are drawn for each row."""
    means: Floats = rows @ _shares_drawn(rows.shape[1])  # [num_rows, num_resamples]
    return means


@functools.lru_cache(maxsize=4)
def _shares_drawn(num_problems: int) -> Floats:
    """Each problem's share of each resample: [num_problems, num_resamples]."""
    drawn = np.random.default_rng(SEED).multinomial(
        num_problems, np.full(num_problems, 1.0 / num_problems), size=NUM_RESAMPLES
    )  # [num_resamples, num_problems]
    return drawn.T / num_problems


def _interval(value: float, resampled: Floats) -> Interval:
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Interval(value, float(low), float(high))
