"""The sampler: every row's sampling settings and token counts as tensors, and the draw of a step.

Knows nothing of requests, stop conditions or how logits came to be.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend, RowSettings
from zipage_lang.runtime.device_copy import send_ints
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import RowSetup, Sample, TokenLogprobs

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_TOKEN = (
    "no token could be drawn: the logits hold NaN or infinity, or every token is suppressed; check "
    "the model's weights, min_tokens with stop_token_ids, and logit_bias"
)
SCORED_LINES = 64  # prompt positions scored at a time; bounds the vocabulary-wide temporaries


@dataclasses.dataclass(slots=True)
class Draws:
    """One step's drawn tokens, on the device and on their way to the host."""

    rows: tuple[int, ...]
    token_ids: Tensor  # int64 [num_draws]
    record: Tensor  # float64 [num_draws, 2 or 4 + 2 * max top]: id, is finite, then logprob scores
    num_top: tuple[int | None, ...]  # per draw; None: no logprobs asked for
    _copied: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        """Send the record to the host behind what was launched so far, without waiting for it."""
        if self.record.device.type != "cpu":
            host = torch.empty(self.record.shape, dtype=self.record.dtype, pin_memory=True)
            self.record = host.copy_(self.record, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def samples(self) -> tuple[Sample, ...]:
        """The draws as plain values: the step's one copy to the host.

        A row whose logits held a NaN or +inf, or that had no token left to draw, gets an error.
        """
        if self._copied is not None:
            self._copied.synchronize()
        lines = self.record.tolist()
        return tuple(
            _sample(row, line, num_top)
            for row, line, num_top in zip(self.rows, lines, self.num_top, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Lines:
    """Some lines of a batch of draws, and the rows they stand for."""

    lines: Tensor  # int64 [num_lines], into the batch
    rows: Tensor  # int64 [num_lines]
    is_all: bool  # they are the whole batch, in order

    def take(self, values: Tensor) -> Tensor:
        return values if self.is_all else values[self.lines]


@dataclasses.dataclass(frozen=True, slots=True)
class _Edits:
    """Sparse changes to logits: entry i belongs to line lines[i] and token token_ids[i]."""

    lines: Tensor  # int64 [num_edits]
    rows: Tensor  # int64 [num_edits]
    token_ids: Tensor  # int64 [num_edits]
    values: Tensor  # float32 [num_edits]


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Which lines of a batch use which feature; one that no line uses is None, and skipped."""

    rows: Tensor  # int64 [num_draws]
    biased: _Edits | None
    held_back: _Edits | None  # tokens that end the output, for rows with min_tokens
    penalized: _Lines | None
    count_slots: Tensor | None  # int64 [num_penalized]
    max_top_k: int  # of the lines with top_k or top_p; 0: there are none
    scored: _Lines | None
    num_top: tuple[int | None, ...]


class _TokenCounts:
    """Which tokens each penalised row has seen; memory is held for those rows only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.generated = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.slots: dict[int, int] = {}  # row -> line of the two tensors
        self._free: list[int] = []

    def fill(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if row not in self.slots:
            if not self._free:
                self._grow()
            self.slots[row] = self._free.pop()
        slot, device = self.slots[row], self.generated.device
        prompt_ids = torch.tensor(prompt, dtype=torch.int64, device=device)
        self.in_prompt[slot].zero_().index_fill_(0, prompt_ids, True)
        output_ids = torch.tensor(output, dtype=torch.int64, device=device)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        self.generated[slot].zero_().index_add_(0, output_ids, ones)

    def drop(self, row: int) -> None:
        if row in self.slots:
            self._free.append(self.slots.pop(row))

    def _grow(self) -> None:
        num_slots = len(self.generated)
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(self._more())])
        self.generated = torch.cat([self.generated, self.generated.new_zeros(self._more())])
        self._free += range(num_slots, len(self.generated))

    def _more(self) -> tuple[int, int]:
        return (max(4, len(self.slots)), self.generated.shape[1])


class Sampler:
    """Draws the next token of each row. Rows keep settings and state between steps.

    Order of a draw: logit_bias; tokens that end the output to -inf while min_tokens is not reached;
    repetition, then presence and frequency penalty; greedy choice if temperature is 0 (ties: lowest
    id); else temperature, top_k, top_p, min_p, and one random number. Logprobs are of the logits as
    they came. The random number depends on the row's seed and on how many tokens it has generated.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        backend: Backend,
        device: torch.device,
    ) -> None:
        self.vocab_size, self.backend, self.device = vocab_size, backend, torch.device(device)
        self._eos_token_ids = tuple(eos_token_ids)
        self.last_token_ids = self._zeros(max_rows, torch.int64)  # [max_rows], read by the forward
        self._seeds = self._zeros(max_rows, torch.int64)
        self._num_generated = self._zeros(max_rows, torch.int64)
        self._min_tokens = self._zeros(max_rows, torch.int64)
        self._top_k = self._zeros(max_rows, torch.int64)
        self._temperature = self._zeros(max_rows, torch.float64)
        self._top_p = self._zeros(max_rows, torch.float64)
        self._min_p = self._zeros(max_rows, torch.float64)
        self._repetition = self._zeros(max_rows, torch.float64)
        self._presence = self._zeros(max_rows, torch.float64)
        self._frequency = self._zeros(max_rows, torch.float64)
        self._settings = RowSettings(
            self._seeds,
            self._num_generated,
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
        )
        self._counts = _TokenCounts(vocab_size, self.device)
        self._params: dict[int, SamplingParams] = {}
        self._batches: dict[tuple[int, ...], _Batch] = {}  # the latest step's batch, if still valid

    def set_up_row(self, setup: RowSetup) -> None:
        """A request takes the row: settings, counts and the place in its random stream are new."""
        row, sampling = setup.row, setup.sampling
        output = setup.token_ids[setup.num_prompt_tokens :]
        self._batches.clear()
        self._params[row] = sampling
        self.last_token_ids[row] = setup.token_ids[-1]
        self._seeds[row] = _fold_to_int64(setup.seed)
        self._num_generated[row] = len(output)
        self._min_tokens[row] = sampling.min_tokens
        self._top_k[row] = self._effective_top_k(sampling)
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._repetition[row] = sampling.repetition_penalty
        self._presence[row] = sampling.presence_penalty
        self._frequency[row] = sampling.frequency_penalty
        if _is_penalized(sampling):
            self._counts.fill(row, setup.token_ids[: setup.num_prompt_tokens], output)
        else:
            self._counts.drop(row)

    def draw(self, logits: Tensor, rows: Sequence[int]) -> Draws:
        """Draw one token per row and move the rows' state on. Never waits for the device.

        Args:
            logits: float [num_draws, vocab_size], line i for rows[i]; left as they are.
            rows: distinct rows, each set up before.
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows))
        assert logits.dtype in LOGITS_DTYPES, logits.dtype
        batch = self._batch_of(tuple(rows))
        edited = self._edit(logits, batch)  # [num_draws, vocab_size]
        token_ids, best = self.backend.draw_rows(
            edited, batch.rows, self._settings, batch.max_top_k
        )  # [num_draws] each
        self._record_tokens(batch, token_ids)
        record = torch.stack((token_ids.double(), best.isfinite().double()), 1)  # [num_draws, 2]
        if batch.scored is not None:
            record = self._append_scores(record, logits, batch, batch.scored)
        return Draws(tuple(rows), token_ids, record, batch.num_top)

    def score_prompt(
        self, logits: Tensor, next_token_ids: Tensor, num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Logprobs of known next tokens. Waits for the device.

        Args:
            logits: float [num_positions, vocab_size].
            next_token_ids: int64 [num_positions], the token that follows each position.
            num_top: how many of the likeliest tokens to report at each position.
        """
        scored: list[TokenLogprobs] = []
        parts = zip(logits.split(SCORED_LINES), next_token_ids.split(SCORED_LINES), strict=True)
        for part, token_ids in parts:
            scores = self.backend.score_tokens(part.float(), token_ids, num_top)
            lines = _score_columns(scores).tolist()
            for token_id, line in zip(token_ids.tolist(), lines, strict=True):
                entry = _token_logprobs(token_id, line, num_top)
                assert entry is not None
                scored.append(entry)
        return tuple(scored)

    def _edit(self, logits: Tensor, batch: _Batch) -> Tensor:
        if batch.biased is None and batch.held_back is None and batch.penalized is None:
            return logits
        out = logits.to(torch.float32, copy=True)  # [num_draws, vocab_size]
        if batch.biased is not None:
            edits = batch.biased
            out[edits.lines, edits.token_ids] += edits.values
        if batch.held_back is not None:
            edits = batch.held_back
            is_early = self._num_generated[edits.rows] < self._min_tokens[edits.rows]
            out[edits.lines, edits.token_ids] += torch.where(is_early, edits.values, 0.0)
        if batch.penalized is not None:
            out[batch.penalized.lines] = self._penalize(out, batch.penalized, batch.count_slots)
        return out

    def _penalize(self, logits: Tensor, group: _Lines, count_slots: Tensor | None) -> Tensor:
        return self.backend.penalize(
            group.take(logits),
            self._counts.in_prompt[count_slots],
            self._counts.generated[count_slots],
            self._repetition[group.rows],
            self._presence[group.rows],
            self._frequency[group.rows],
        )

    def _record_tokens(self, batch: _Batch, token_ids: Tensor) -> None:
        self.last_token_ids[batch.rows] = token_ids
        self._num_generated[batch.rows] += 1
        if batch.penalized is not None:
            self._counts.generated[batch.count_slots, batch.penalized.take(token_ids)] += 1

    def _append_scores(
        self, record: Tensor, logits: Tensor, batch: _Batch, scored: _Lines
    ) -> Tensor:
        num_top = max(num for num in batch.num_top if num is not None)
        token_ids = scored.take(record[:, 0]).to(torch.int64)
        scores = self.backend.score_tokens(scored.take(logits).float(), token_ids, num_top)
        wide = record.new_zeros((len(record), 4 + 2 * num_top))  # [num_draws, 4 + 2 * num_top]
        wide[:, :2] = record
        wide[scored.lines, 2:] = _score_columns(scores)
        return wide

    def _batch_of(self, rows: tuple[int, ...]) -> _Batch:
        if rows not in self._batches:
            self._batches.clear()
            self._batches[rows] = self._group(rows)
        return self._batches[rows]

    def _group(self, rows: tuple[int, ...]) -> _Batch:
        assert len(set(rows)) == len(rows), rows
        params = [self._params[row] for row in rows]
        top_ks = [self._effective_top_k(sampling) for sampling in params if _is_filtered(sampling)]
        penalized = self._lines_where(rows, _is_penalized)
        slots = [self._counts.slots[row] for row in rows if row in self._counts.slots]
        return _Batch(
            rows=self._int64(rows),
            biased=self._edits(rows, self._biases),
            held_back=self._edits(rows, self._held_back),
            penalized=penalized,
            count_slots=None if penalized is None else self._int64(slots),
            max_top_k=max(top_ks, default=0),
            scored=self._lines_where(rows, _is_scored),
            num_top=tuple(sampling.logprobs for sampling in params),
        )

    def _lines_where(
        self, rows: tuple[int, ...], wanted: Callable[[SamplingParams], bool]
    ) -> _Lines | None:
        lines = [line for line, row in enumerate(rows) if wanted(self._params[row])]
        if not lines:
            return None
        picked = self._int64([rows[line] for line in lines])
        return _Lines(self._int64(lines), picked, len(lines) == len(rows))

    def _edits(
        self, rows: tuple[int, ...], edits_of: Callable[[SamplingParams], dict[int, float]]
    ) -> _Edits | None:
        edits = [
            (line, row, token_id, value)
            for line, row in enumerate(rows)
            for token_id, value in edits_of(self._params[row]).items()
            if token_id < self.vocab_size  # a token that does not exist is never drawn anyway
        ]
        if not edits:
            return None
        lines, edit_rows, token_ids, values = zip(*edits, strict=True)
        return _Edits(
            self._int64(lines),
            self._int64(edit_rows),
            self._int64(token_ids),
            torch.tensor(values, dtype=torch.float32, device=self.device),
        )

    def _biases(self, sampling: SamplingParams) -> dict[int, float]:
        return sampling.logit_bias or {}

    def _held_back(self, sampling: SamplingParams) -> dict[int, float]:
        """Tokens that may not end the output yet; end-of-sequence ones even with ignore_eos."""
        if sampling.min_tokens == 0:
            return {}
        return dict.fromkeys((*self._eos_token_ids, *sampling.stop_token_ids), float("-inf"))

    def _effective_top_k(self, sampling: SamplingParams) -> int:
        return min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size

    def _zeros(self, max_rows: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(max_rows, dtype=dtype, device=self.device)

    def _int64(self, values: Sequence[int]) -> Tensor:
        return send_ints(values, self.device)


def _sample(row: int, line: Sequence[float], num_top: int | None) -> Sample:
    """Read one line of a record."""
    token_id, is_finite = int(line[0]), line[1]
    if not is_finite:
        return Sample(row, token_id, error=NO_TOKEN)
    return Sample(row, token_id, _token_logprobs(token_id, line[2:], num_top))


def _is_penalized(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _is_scored(sampling: SamplingParams) -> bool:
    return sampling.logprobs is not None


def _fold_to_int64(seed: int) -> int:
    """Any integer onto 64 signed bits; what fits stays distinct."""
    return (seed + 2**63) % 2**64 - 2**63


def _score_columns(scores: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    logprobs, ranks, top_ids, top_logprobs = (part.double() for part in scores)
    return torch.cat((logprobs[:, None], ranks[:, None], top_ids, top_logprobs), 1)


def _token_logprobs(
    token_id: int, columns: Sequence[float], num_top: int | None
) -> TokenLogprobs | None:
    """Read one line of `_score_columns`, whose top part may be wider than `num_top`."""
    if num_top is None:
        return None
    width = (len(columns) - 2) // 2
    ids, logprobs = columns[2 : 2 + num_top], columns[2 + width : 2 + width + num_top]
    top = tuple((int(top_id), logprob) for top_id, logprob in zip(ids, logprobs, strict=True))
    return TokenLogprobs(token_id, columns[0], int(columns[1]), top)
