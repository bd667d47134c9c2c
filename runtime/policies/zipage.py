"""The `zipage` policy: recent attention with history, less key redundancy (arXiv 2603.08743).

Knows nothing of blocks or of how slots are moved.
"""

import dataclasses
from typing import Literal

from torch import Tensor

from zipage_lang.kernels.backend import ScoreBlend
from zipage_lang.runtime.policies.measures import require, require_odd
from zipage_lang.runtime.policies.policy import TailView


@dataclasses.dataclass(frozen=True)
class Zipage:
    """The paper's score with its recommended settings.

    lambda * max(S, alpha * F) - (1 - lambda) * R, max-pooled once at a request's first compaction;
    S attention mass of the newest queries, F its decayed history, R softmax of key redundancy.
    Source: Zipage, equations 1 to 4, in the form of the published code (equation 4 prints S - R).

    Here: S is a share of all that a query attends to, a protected prompt included, where the paper
    lets the prompt compete. Chunks of redundancy are runs of tail slots, not blocks.
    Reads: the tail's keys once.
    """

    name: str = "zipage"
    num_queries: int = 16  # w
    num_recent: int = 16  # the window that is always kept; the paper's w again
    num_sinks: int = 0
    history_decay: float = 0.8  # alpha
    mass_weight: float = 0.2  # lambda
    temperature: float = 0.4  # tau
    pool_kernel: int = 5
    similarity_threshold: float = 0.5  # cosine above which two keys count as duplicates
    redundancy: Literal["lightning", "flash"] = "lightning"  # flash compares with the whole tail
    redundancy_chunk: int = 256  # slots compared with each other by lightning; the paper's block

    def __post_init__(self) -> None:
        if self.redundancy not in ("lightning", "flash"):
            raise ValueError(f"redundancy={self.redundancy!r} must be lightning or flash")
        require(self, 0, 1, "history_decay", "mass_weight", "similarity_threshold")
        require(self, 1e-6, 1e6, "temperature")
        require(self, 1, 2**20, "redundancy_chunk")
        require_odd(self, "pool_kernel")

    def score(self, view: TailView) -> ScoreBlend:
        mass, similarity = self._mass_and_similarity(view)
        return ScoreBlend(
            mass=mass,
            similarity=similarity,
            decay=self.history_decay,
            pool_kernel=self.pool_kernel,
            temperature=self.temperature,
            mass_weight=self.mass_weight,
        )

    def _mass_and_similarity(self, view: TailView) -> tuple[Tensor, Tensor]:
        if self.redundancy == "flash":
            return view.attention_mass(), view.similarity(self.similarity_threshold)
        return view.mass_and_similarity(self.redundancy_chunk, self.similarity_threshold)
