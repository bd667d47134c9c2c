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

To ship it, name an instance (or the class) under the entry point group `zipage.policies`;
`docs/policies.md` shows how. The fields of a policy that is a dataclass are its parameters, which
a request may set: `policy="short-keys:num_recent=32"`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend, Forecast, ScoreBlend, ScoreTiers, TailQueries
from zipage_lang.kernels.reference.tails import stored_history

# Scratch of one piece in which a policy that gathers keys or values works through a batch.
_PIECE_BYTES = 64 * 2**20


class QueryStats(NamedTuple):
    """What a model's queries are like before they are rotated, per layer and query head.

    Number f of a head is the complex pair of its dimensions f and f + head_dim / 2.
    """

    center: Tensor  # float32 [num_layers, num_q_heads, head_dim], mean of q_f, as those pairs
    length: Tensor  # float32 [num_layers, num_q_heads, head_dim / 2], mean of |q_f|
    frequencies: Tensor  # float32 [head_dim / 2], the rotary angle per position


class Calibration(NamedTuple):
    """What is known of the model at hand; only what a policy says that it needs."""

    query_stats: QueryStats | None = None  # for policies that set `needs_query_stats`
    forecast: Forecast | None = None  # for policies that set `needs_forecast`


NOTHING_KNOWN = Calibration()


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
    num_keep: Tensor  # int64 [num_rows], K: how many of them will be kept
    max_new: int  # the most slots of a row that were never compacted before; known to the host
    stateful_lens: Tensor  # int64 [num_rows], leading tail slots that were compacted before
    logical_lens: Tensor  # int64 [num_rows], tokens so far; the newest has logical_lens - 1
    layers: Tensor  # int64 [num_rows], layer index
    num_layers: int
    seeds: Tensor  # int64 [num_rows], for policies that draw
    queries: TailQueries | None  # the newest queries of each row; None: the policy asked for none
    calibration: Calibration = NOTHING_KNOWN

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

    def value_range(self) -> Tensor:
        """max - min over each value's dimensions, float32 [num_rows, num_kv_heads, max_tail]."""
        return self.backend.value_range(self.kv_blocks, self.slots)

    def history(self) -> Tensor:
        """Global score F, float32 [num_rows, num_kv_heads, max_tail]; 0 where a slot has none."""
        return stored_history(self.score_blocks, self.slots, self.stateful_lens)

    def attention_mass(self) -> Tensor:
        """Share of the newest queries' attention, float32 [num_rows, num_kv_heads, max_tail].

        Maximum over a KV head's query heads, mean over queries; see `scores.attention_mass`.
        """
        return self.backend.attention_mass(
            self.kv_blocks, self.slots, self.positions, self.asked_queries(), self.scale
        )

    def mass_and_similarity(self, chunk: int, threshold: float) -> tuple[Tensor, Tensor]:
        """Attention mass and in-chunk key similarity in one pass over the keys."""
        return self.backend.mass_and_similarity(
            self.kv_blocks,
            self.slots,
            self.positions,
            self.asked_queries(),
            self.scale,
            chunk,
            threshold,
        )

    def similarity(self, threshold: float) -> Tensor:
        """Mean similarity of each key to the whole tail; see `scores.flash_similarity`."""
        return self.backend.flash_similarity(self.kv_blocks, self.slots, self.positions, threshold)

    def forecast_scores(self) -> tuple[Tensor, Tensor]:
        """How strongly each slot is likely to be attended later, and the part of that which its
        age does not change; both float32 [num_rows, num_kv_heads, max_tail].

        The policy must return the second as `Scores.history`, and may keep no other: slots that
        were compacted before are not read again.
        """
        forecast = self.calibration.forecast
        assert forecast is not None, "a policy that asks for forecasts must set needs_forecast"
        return self.backend.forecast_scores(
            self.kv_blocks,
            self.score_blocks,
            self.slots,
            self.positions,
            self.stateful_lens,
            self.logical_lens,
            self.layers,
            forecast,
        )

    def highest(self, scores: Tensor, counts: Tensor) -> Tensor:
        """The `counts` best-scored slots of every row and head, bool of the scores' shape.

        Of equal scores the newer token. counts: int64 [num_rows]; 0 and less choose nothing.
        """
        some = counts.clamp(min=1).minimum(self.lens)  # [num_rows]
        tails = (self.positions, self.lens)
        chosen = self.backend.select_top_k(scores.contiguous(), *tails, some)
        return chosen & (counts > 0)[:, None, None]

    def in_pieces(self, measure: Callable[["TailView"], Tensor], vectors: int = 2) -> Tensor:
        """`measure` of a few rows at a time, joined; it must treat every row by itself.

        Bounds the memory of measures that gather keys or values. vectors: how many float32 vectors
        of head_dim the measure holds per slot and head.
        """
        num_rows, num_kv_heads, max_tail = self.positions.shape
        row_bytes = 4 * vectors * num_kv_heads * max(max_tail, 1) * self.kv_blocks.shape[-1]
        step = max(1, _PIECE_BYTES // row_bytes)
        parts = [slice(first, first + step) for first in range(0, num_rows, step)]
        return torch.cat([measure(self._rows(part)) for part in parts])

    def remembered(self, measure: Callable[["TailView"], Tensor], vectors: int = 2) -> Tensor:
        """A measure that never changes for a slot: kept as history, so only new slots are read.

        measure: as for `in_pieces`, and a slot's value may depend on that slot alone. The policy
        must return the result as `Scores.history`, and may keep no other.
        """
        num_rows, num_kv_heads, max_tail = self.positions.shape
        num_new = min(self.max_new, max_tail)
        newest = torch.arange(num_new, device=self.lens.device) - num_new + self.lens[:, None]
        at = newest.clamp(min=0)  # [num_rows, num_new]
        slots = torch.where(newest >= 0, self.slots.gather(1, at), -1)
        index = at[:, None].expand(-1, num_kv_heads, -1)  # [num_rows, num_kv_heads, num_new]
        new_view = dataclasses.replace(self, slots=slots, positions=self.positions.gather(2, index))
        found = new_view.in_pieces(measure, vectors)  # [num_rows, num_kv_heads, num_new]
        is_new = (newest >= self.stateful_lens[:, None])[:, None]  # the rest is remembered
        history = self.history()
        # What is remembered goes behind the tail, where it is cut off.
        target = torch.where(is_new.expand_as(index), index, max_tail)
        padded = torch.cat([history, history.new_zeros(num_rows, num_kv_heads, 1)], dim=2)
        return padded.scatter_(2, target, found)[..., :max_tail].contiguous()

    def _rows(self, part: slice) -> "TailView":
        queries = self.queries
        if queries is not None:
            queries = queries._replace(
                ring_slots=queries.ring_slots[part], positions=queries.positions[part]
            )
        return dataclasses.replace(
            self,
            slots=self.slots[part],
            positions=self.positions[part],
            lens=self.lens[part],
            num_keep=self.num_keep[part],
            stateful_lens=self.stateful_lens[part],
            logical_lens=self.logical_lens[part],
            layers=self.layers[part],
            seeds=self.seeds[part],
            queries=queries,
        )

    def asked_queries(self) -> TailQueries:
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

    def score(self, view: TailView) -> Scores | ScoreBlend | ScoreTiers:
        """Score every tail slot; pure: writes nothing.

        A `ScoreBlend` leaves the last step of the Zipage score to the compressor, which takes it
        together with the selection; its meaning and its outcome are those of the `Scores` that
        `combine_scores` makes of it. So do `ScoreTiers`, which divide the budget.

        A policy that scores with `calibration.query_stats` also has `needs_query_stats = True`, one
        that asks for `TailView.forecast_scores` has `needs_forecast = True`.
        """
