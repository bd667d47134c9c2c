"""The `keydiff` policy: keys that point elsewhere than the mean key stay (arXiv 2504.15364).

Knows nothing of queries, blocks or of how slots are moved.
"""

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class KeyDiff:
    """Minus the cosine of a key to the mean of the head's normalised keys (there equation 3).

    Here: the mean is over the tail, without a protected prompt. A window of the newest tokens is
    kept on top; set `num_recent=0` for the published form.
    Reads: the tail's keys once.
    """

    name: str = "keydiff"
    num_queries: int = 0
    num_recent: int = 16
    num_sinks: int = 0

    def score(self, view: TailView) -> Scores:
        return Scores(keep=-view.in_pieces(_cosine_to_mean, vectors=3))


def _cosine_to_mean(view: TailView) -> Tensor:
    unit = F.normalize(view.keys(), dim=-1)  # padding stays zero
    mean = F.normalize(unit.sum(2, keepdim=True), dim=-1)  # [num_rows, num_kv_heads, 1, head_dim]
    return (unit * mean).sum(-1)
