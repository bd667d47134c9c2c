"""Which lines of a batch of draws use which sampling feature, as tensors made once per batch.

Knows nothing of logits, random numbers or counts of tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zipage_lang.runtime.device_copy import send_array, send_ints
from zipage_lang.runtime.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Some lines of a batch of draws, and the rows they stand for."""

    lines: Tensor  # int64 [num_lines], into the batch
    rows: Tensor  # int64 [num_lines]
    is_all: bool  # they are the whole batch, in order

    def take(self, values: Tensor) -> Tensor:
        return values if self.is_all else values[self.lines]


@dataclasses.dataclass(frozen=True, slots=True)
class Edits:
    """Sparse changes to logits: entry i belongs to line lines[i] and token token_ids[i]."""

    lines: Tensor  # int64 [num_edits]
    rows: Tensor  # int64 [num_edits]
    token_ids: Tensor  # int64 [num_edits]
    values: Tensor  # float32 [num_edits]


@dataclasses.dataclass(frozen=True, slots=True)
class DrawBatch:
    """A feature that no line uses is None, and skipped."""

    rows: Tensor  # int64 [num_draws]
    biased: Edits | None
    held_back: Edits | None  # tokens that end the output, for rows with min_tokens
    penalized: Lines | None
    count_slots: Tensor | None  # int64 [num_penalized]
    max_top_k: int  # of the lines with top_k or top_p; 0: there are none
    scored: Lines | None
    num_top: tuple[int | None, ...]

    @property
    def is_edited(self) -> bool:
        """Whether the logits are drawn from otherwise than as they came."""
        return not (self.biased is None and self.held_back is None and self.penalized is None)


@dataclasses.dataclass(frozen=True, slots=True)
class RowWishes:
    """What one row's settings ask of its draws; found once, when the row is set up."""

    is_penalized: bool
    top_k: int  # tokens that top_k leaves, of a row with top_k or top_p; 0: it has neither
    biases: Mapping[int, float]  # token id -> value
    held_back: Mapping[int, float]
    num_top: int | None  # None: no logprobs

    @property
    def are_bare(self) -> bool:
        """Whether the draw takes this line as it takes most: no list of a batch names it."""
        is_edited = self.is_penalized or self.biases or self.held_back
        return not is_edited and self.num_top is None


class _Asking(NamedTuple):
    line: int
    row: int
    wishes: RowWishes


@dataclasses.dataclass(frozen=True, slots=True)
class BatchMaker:
    """Groups the lines of batches for one model on one device."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device

    def wishes(self, sampling: SamplingParams) -> RowWishes:
        """What such a row asks for."""
        return RowWishes(
            is_penalized=is_penalized(sampling),
            top_k=self.effective_top_k(sampling) if _is_filtered(sampling) else 0,
            biases=self._existing(sampling.logit_bias or {}),
            held_back=self._existing(self._held_back(sampling)),
            num_top=sampling.logprobs,
        )

    def group(
        self,
        rows: tuple[int, ...],
        wishes: Sequence[RowWishes],
        count_slots: Mapping[int, int],
    ) -> DrawBatch:
        """rows: distinct; wishes: of each; count_slots: where penalised rows count tokens."""
        assert len(set(rows)) == len(rows), rows
        asking = [
            _Asking(line, rows[line], asked)
            for line, asked in enumerate(wishes)
            if not asked.are_bare
        ]
        penalized = [item for item in asking if item.wishes.is_penalized]
        slots = [count_slots[item.row] for item in penalized]
        scored = [item for item in asking if item.wishes.num_top is not None]
        return DrawBatch(
            rows=self._int64(rows),
            biased=self._edits(asking, lambda asked: asked.biases),
            held_back=self._edits(asking, lambda asked: asked.held_back),
            penalized=self._lines(penalized, len(rows)),
            count_slots=self._int64(slots) if slots else None,
            max_top_k=max((asked.top_k for asked in wishes), default=0),
            scored=self._lines(scored, len(rows)),
            num_top=tuple(asked.num_top for asked in wishes),
        )

    def effective_top_k(self, sampling: SamplingParams) -> int:
        return min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size

    def _lines(self, items: Sequence[_Asking], num_lines: int) -> Lines | None:
        if not items:
            return None
        lines = self._int64([item.line for item in items])
        picked = self._int64([item.row for item in items])
        return Lines(lines, picked, len(items) == num_lines)

    def _edits(
        self, asking: Sequence[_Asking], edits_of: Callable[[RowWishes], Mapping[int, float]]
    ) -> Edits | None:
        edits = [
            (item.line, item.row, token_id, value)
            for item in asking
            for token_id, value in edits_of(item.wishes).items()
        ]
        if not edits:
            return None
        lines, edit_rows, token_ids, values = zip(*edits, strict=True)
        return Edits(
            self._int64(lines),
            self._int64(edit_rows),
            self._int64(token_ids),
            send_array(np.array(values, dtype=np.float32), self.device),
        )

    def _existing(self, edits: Mapping[int, float]) -> Mapping[int, float]:
        """A token that does not exist is never drawn anyway."""
        return {token: value for token, value in edits.items() if token < self.vocab_size}

    def _held_back(self, sampling: SamplingParams) -> dict[int, float]:
        """Tokens that may not end the output yet; end-of-sequence ones even with ignore_eos.

        None with a grammar, whose own mask sees to it: where nothing but the end is left, it comes.
        """
        if sampling.min_tokens == 0 or sampling.grammar is not None:
            return {}
        return dict.fromkeys((*self.eos_token_ids, *sampling.stop_token_ids), float("-inf"))

    def _int64(self, values: Sequence[int]) -> Tensor:
        return send_ints(values, self.device)


def is_penalized(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0)
