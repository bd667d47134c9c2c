"""Which lines of a batch of draws use which sampling feature, as tensors made once per batch.

Knows nothing of logits, random numbers or counts of tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

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
    ones: Tensor  # int64 [num_draws], what a draw adds to its row's count
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
class BatchMaker:
    """Groups the lines of batches for one model on one device."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device

    def group(
        self,
        rows: tuple[int, ...],
        params: Sequence[SamplingParams],
        count_slots: Mapping[int, int],
    ) -> DrawBatch:
        """rows: distinct; params: of each; count_slots: where penalised rows count tokens."""
        assert len(set(rows)) == len(rows), rows
        top_ks = [self.effective_top_k(sampling) for sampling in params if _is_filtered(sampling)]
        penalized = self._lines_where(rows, params, is_penalized)
        slots = [count_slots[row] for row in rows if row in count_slots]
        return DrawBatch(
            rows=self._int64(rows),
            ones=self._int64([1] * len(rows)),
            biased=self._edits(rows, params, _biases),
            held_back=self._edits(rows, params, self._held_back),
            penalized=penalized,
            count_slots=None if penalized is None else self._int64(slots),
            max_top_k=max(top_ks, default=0),
            scored=self._lines_where(rows, params, _is_scored),
            num_top=tuple(sampling.logprobs for sampling in params),
        )

    def effective_top_k(self, sampling: SamplingParams) -> int:
        return min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size

    def _lines_where(
        self,
        rows: tuple[int, ...],
        params: Sequence[SamplingParams],
        wanted: Callable[[SamplingParams], bool],
    ) -> Lines | None:
        lines = [line for line, sampling in enumerate(params) if wanted(sampling)]
        if not lines:
            return None
        picked = self._int64([rows[line] for line in lines])
        return Lines(self._int64(lines), picked, len(lines) == len(rows))

    def _edits(
        self,
        rows: tuple[int, ...],
        params: Sequence[SamplingParams],
        edits_of: Callable[[SamplingParams], dict[int, float]],
    ) -> Edits | None:
        edits = [
            (line, row, token_id, value)
            for line, (row, sampling) in enumerate(zip(rows, params, strict=True))
            for token_id, value in edits_of(sampling).items()
            if token_id < self.vocab_size  # a token that does not exist is never drawn anyway
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


def _biases(sampling: SamplingParams) -> dict[int, float]:
    return sampling.logit_bias or {}


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _is_scored(sampling: SamplingParams) -> bool:
    return sampling.logprobs is not None
