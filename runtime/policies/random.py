"""The `random` policy: prompt and newest tokens kept, the rest by lot (arXiv 2609.03430).

Knows nothing of keys, queries or attention.
"""

import dataclasses

from zipage_lang.runtime.policies.measures import lots
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class Random:
    """Uniform noise per (layer, KV head, token): the null baseline that others must beat.

    Random Attention's score (section 2 there): prompt and recent tokens +inf, others a fresh lot
    at each compaction, so a token survives n of them with probability about (K / (K + E)) ** n.
    The prompt is kept where requests protect it. Reads no keys and no values.
    """

    name: str = "random"
    num_queries: int = 0
    num_recent: int = 64
    num_sinks: int = 0
    fresh: bool = True  # False: one lot per token for good, a uniform sample of all that was said

    def score(self, view: TailView) -> Scores:
        return Scores(keep=lots(view, fresh=self.fresh))
