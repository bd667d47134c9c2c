"""Perplexity of a text, window by window: how well each token is foretold under each setting.

Knows nothing of engines or of how scores are made.
"""

import math
from collections.abc import Sequence

from zipage_lang.evaluation.probe import ProbeText
from zipage_lang.evaluation.statistics import Interval, difference_interval, mean_interval
from zipage_lang.runtime.messages import LogprobEntry

HEAD_SHARE = 16  # one in so many tokens of a window is its head: not scored, protected
MAX_EXPONENT = 700.0


def text_windows(
    token_ids: Sequence[int], window_len: int, num_windows: int, prefix: Sequence[int]
) -> list[ProbeText]:
    """The first windows of a text, side by side; `prefix` (a BOS token) stands before each.

    Raises ValueError for a text shorter than one window.
    """
    step, head_len = window_len - len(prefix), max(1, window_len // HEAD_SHARE)
    starts = range(0, len(token_ids) - step + 1, step)
    windows = [[*prefix, *token_ids[start : start + step]] for start in starts[:num_windows]]
    if not windows:
        raise ValueError(
            f"the text has {len(token_ids)} tokens, but a window takes {step}; lower --window"
        )
    return [ProbeText(window, head_len, head_len) for window in windows]


def perplexity_figures(
    texts: Sequence[ProbeText],
    scores: Sequence[Sequence[LogprobEntry]],
    full_scores: Sequence[Sequence[LogprobEntry]],
) -> dict[str, Interval]:
    """Figures by name; intervals resample windows, differences are window by window."""
    nats, full_nats = _nats(scores), _nats(full_scores)
    late = [len(text.token_ids) // 2 - text.scored_from for text in texts]
    pairs = list(zip(scores, late, strict=True))
    late_nats = _nats([entries[start:] for entries, start in pairs])
    return {
        "perplexity": _exp(mean_interval(nats)),
        "perplexity, second half": _exp(mean_interval(late_nats)),
        "nats per token": mean_interval(nats),
        "nats - full": difference_interval(nats, full_nats),
    }


def _nats(scores: Sequence[Sequence[LogprobEntry]]) -> list[float]:
    """Mean negative log-probability of each text's tokens."""
    return [-sum(entry.logprob for entry in entries) / len(entries) for entries in scores]


def _exp(interval: Interval) -> Interval:
    value, low, high = (
        math.exp(min(part, MAX_EXPONENT)) for part in (interval.value, interval.low, interval.high)
    )
    return Interval(value, low, high)
