"""The `streaming` policy: a few sinks and the newest tokens (StreamingLLM, arXiv 2309.17453).

Knows nothing of keys, queries or attention.
"""

import dataclasses

from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class Streaming:
    """Keeps the tail's first `num_sinks` tokens and, with what is left of the budget, the newest.

    A budget of `num_sinks` or less keeps the newest of the sinks. Source: StreamingLLM, section 3.

    Here: with a protected prompt the sinks come on top of it ("prefix sliding", arXiv 2608.26070);
    positions stay those of the text, where the paper counts them anew within the cache.
    Reads: neither keys nor values.
    """

    name: str = "streaming"
    num_queries: int = 0
    num_recent: int = 0
    num_sinks: int = 4

    def score(self, view: TailView) -> Scores:
        return Scores(keep=view.positions.float())  # exact: positions stay far below 2 ** 24
