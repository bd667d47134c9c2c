"""What a compaction policy is: the tail it sees (TailView) and the scores it gives back.

Knows nothing of how slots are selected, moved or freed.

A policy is one small class. It says how many of the newest queries it needs and what it protects
by position, and scores every tail slot; the compressor does the rest. The smallest one:

    @dataclasses.dataclass(frozen=True)
    class ShortKeys:
        name: str = "short-keys"
        num_queries: int = 0
        num_recent: int = 16
        num_sinks: int = 0

        def score(self, view: TailView) -> Scores:
            return Scores(keep=-view.keys().norm(dim=-1))

To ship it, name an instance (or the class) under the entry point group `zipage_lang.policies`.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from zipage_lang.kernels.backend import Backend, ScoreBlend, TailQueries
from zipage_lang.kernels.reference.tails import stored_history


class Scores(NamedTuple):
    """What a policy says of the tail."""

    keep: Tensor  # float32 [num_rows, num_kv_heads, max_tail], the highest are kept
    # Same shape: the global score F that kept slots carry from now on. None: it keeps no history.
    history: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TailView:
    """The tails of a batch. One row is one request in one layer; rows are independent.

    Tails are padded at the end; what a score says of padding is ignored. Keys, values, history and
    attention are gathered when asked for, so a policy pays only for what it uses.
    """

    backend: Backend
    kv_blocks: Tensor  # [num_blocks, 2, block_size, num_kv_heads, head_dim], of all layers
    score_blocks: Tensor  # float32 [num_blocks, block_size, num_kv_heads]
    slots: Tensor  # int64 [num_rows, max_tail], physical slots in those blocks, padding -1
    positions: Tensor  # int32 [num_rows, num_kv_heads, max_tail], logical positions
    lens: Tensor  # int64 [num_rows], tail slots
    stateful_lens: Tensor  # int64 [num_rows], leading tail slots that were compacted before
    logical_lens: Tensor  # int64 [num_rows], tokens so far; the newest has logical_lens - 1
    layers: Tensor  # int64 [num_rows], layer index
    num_layers: int
    seeds: Tensor  # int64 [num_rows], for policies that draw
    queries: TailQueries | None  # the newest queries of each row; None: the policy asked for none

    @property
    def valid(self) -> Tensor:
        """bool [num_rows, max_tail]: real slots, not padding."""
        return self.slots >= 0

    @property
    def is_first(self) -> Tensor:
        """bool [num_rows]: never compacted before, so slot order is still token order."""
        return self.stateful_lens == 0

    @property
    def scale(self) -> float:
        """Factor on q.k before softmax: head_dim ** -0.5."""
        return float(self.kv_blocks.shape[-1]) ** -0.5

    def keys(self) -> Tensor:
        """Keys after RoPE, float32 [num_rows, num_kv_heads, max_tail, head_dim], padding zero."""
        return self.backend.gather_keys(self.kv_blocks, self.slots)

    def values(self) -> Tensor:
        """Values, float32 [num_rows, num_kv_heads, max_tail, head_dim], padding zero."""
        return self.backend.gather_values(self.kv_blocks, self.slots)

    def history(self) -> Tensor:
        """Global score F, float32 [num_rows, num_kv_heads, max_tail]; 0 where a slot has none."""
        return stored_history(self.score_blocks, self.slots, self.stateful_lens)

    def attention_mass(self) -> Tensor:
        """Share of the newest queries' attention, float32 [num_rows, num_kv_heads, max_tail].

        Maximum over a KV head's query heads, mean over queries; see `scores.attention_mass`.
        """
        return self.backend.attention_mass(
            self.kv_blocks, self.slots, self.positions, self._asked_queries(), self.scale
        )

    def mass_and_similarity(self, chunk: int, threshold: float) -> tuple[Tensor, Tensor]:
        """Attention mass and in-chunk key similarity in one pass over the keys."""
        return self.backend.mass_and_similarity(
            self.kv_blocks,
            self.slots,
            self.positions,
            self._asked_queries(),
            self.scale,
            chunk,
            threshold,
        )

    def similarity(self, threshold: float) -> Tensor:
        """Mean similarity of each key to the whole tail; see `scores.flash_similarity`."""
        return self.backend.flash_similarity(self.kv_blocks, self.slots, self.positions, threshold)

    def _asked_queries(self) -> TailQueries:
        assert self.queries is not None, "a policy that scores by attention must set num_queries"
        return self.queries


@runtime_checkable
class Policy(Protocol):
    """One way to choose which tail slots live on. Instances hold settings only, never state."""

    @property
    def name(self) -> str:
        """What a request asks for."""

    @property
    def num_queries(self) -> int:
        """Newest queries it scores with; 0: it needs no query slot."""

    @property
    def num_recent(self) -> int:
        """Newest logical positions that are always kept (as many as the budget allows)."""

    @property
    def num_sinks(self) -> int:
        """Oldest tail tokens that are always kept, after the recent ones."""

    def score(self, view: TailView) -> Scores | ScoreBlend:
        """Score every tail slot; pure: writes nothing.

        A `ScoreBlend` leaves the last step of the Zipage score to the compressor, which takes it
        together with the selection; its meaning and its outcome are those of the `Scores` that
        `combine_scores` makes of it.
        """
