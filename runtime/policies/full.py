"""The `full` policy: every token is kept, so there is never anything to compact.

Knows nothing of tensors; the scheduler never plans a compaction for it.
"""

import dataclasses

from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class Full:
    """Full KV cache: the honest baseline."""

    name: str = "full"
    num_queries: int = 0
    num_recent: int = 0
    num_sinks: int = 0

    def score(self, view: TailView) -> Scores:
        raise AssertionError(
            f"policy 'full' never compacts, yet {len(view.lens)} tails were planned"
        )
