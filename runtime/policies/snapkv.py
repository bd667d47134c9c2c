"""The `snapkv` policy: what the newest queries look at, again and again (arXiv 2404.14469).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses

from zipage_lang.runtime.policies.measures import pool_in_token_order, require_odd
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class SnapKV:
    """Attention of the last w queries, max-pooled over neighbours in the text; the window is kept.

    Source: SnapKV, section 4 (there once, after the prompt). This is its form for decoding, which
    repeats the choice at every compaction ("SnapKV-D", arXiv 2512.12008).

    Here: the maximum over the query heads of a KV head, where others take the mean over them.
    Reads: the tail's keys once.
    """

    name: str = "snapkv"
    num_queries: int = 16  # w
    num_recent: int = 16
    num_sinks: int = 0
    pool_kernel: int = 7

    def __post_init__(self) -> None:
        require_odd(self, "pool_kernel")

    def score(self, view: TailView) -> Scores:
        return Scores(keep=pool_in_token_order(view, view.attention_mass(), self.pool_kernel))
