"""The sampler: every row's sampling settings and token counts as tensors, and the draw of a step.

Knows nothing of requests, stop conditions or how logits came to be.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend, RowSettings
from zipage_lang.runtime.constraint import Constraint
from zipage_lang.runtime.draw_batch import BatchMaker, DrawBatch, Lines, RowWishes
from zipage_lang.runtime.drawn_scores import DrawnScores
from zipage_lang.runtime.draws import Draws, token_logprobs
from zipage_lang.runtime.logit_masks import ConstrainedRows
from zipage_lang.runtime.out_of_memory import Retries
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import RowSetup, TokenLogprobs

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MakeConstraint = Callable[[SamplingParams, Sequence[int]], Constraint | None]
SCORED_LINES = 64  # prompt positions scored at a time; bounds the vocabulary-wide temporaries


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
        in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(self._more())])
        self.generated = torch.cat([self.generated, self.generated.new_zeros(self._more())])
        self.in_prompt = in_prompt  # both, or neither where memory is refused
        self._free += range(num_slots, len(self.generated))

    def _more(self) -> tuple[int, int]:
        return (max(4, len(self.slots)), self.generated.shape[1])


class Sampler:
    """Draws the next token of each row. Rows keep settings and state between steps.

    Order of a draw: tokens that grammar or thinking rule out to -inf; logit_bias; tokens that end
    the output to -inf while min_tokens is not reached; repetition, then presence and frequency
    penalty; greedy choice if temperature is 0 (ties: lowest id); else temperature, top_k, top_p,
    min_p, and one random number. Logprobs are of the logits as they came, of a constrained row
    behind its mask. The random number depends on the row's seed and on how many tokens it has
    generated.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        backend: Backend,
        device: torch.device,
        make_constraint: MakeConstraint | None = None,
        retries: Retries | None = None,
    ) -> None:
        """make_constraint: of an output's settings and its tokens so far; None where no request
        has a grammar or watched thinking.
        retries: where refusals of memory are counted; None: nobody asks."""
        self.vocab_size, self.backend, self.device = vocab_size, backend, torch.device(device)
        self._maker = BatchMaker(vocab_size, tuple(eos_token_ids), self.device)
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
            self.last_token_ids,
        )
        self._counts = _TokenCounts(vocab_size, self.device)
        self._drawn_scores = DrawnScores(backend, retries or Retries())
        self._make_constraint = make_constraint
        self._constrained = ConstrainedRows(vocab_size, self.device)
        self._wishes: dict[int, RowWishes] = {}
        # the latest step's batch, if still valid
        self._batches: dict[tuple[int, ...], DrawBatch] = {}

    def set_up_row(self, setup: RowSetup) -> None:
        """A request takes the row: settings, counts and the place in its random stream are new.

        May be called again for the same setup, as after an error half-way.
        """
        row, sampling = setup.row, setup.sampling
        output = setup.token_ids[setup.num_prompt_tokens :]
        self._batches.clear()
        wishes = self._wishes[row] = self._maker.wishes(sampling)
        self.last_token_ids[row] = setup.token_ids[-1]
        self._seeds[row] = _fold_to_int64(setup.seed)
        self._num_generated[row] = len(output)
        self._min_tokens[row] = sampling.min_tokens
        self._top_k[row] = self._maker.effective_top_k(sampling)
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._repetition[row] = sampling.repetition_penalty
        self._presence[row] = sampling.presence_penalty
        self._frequency[row] = sampling.frequency_penalty
        if self._make_constraint is not None:
            self._constrained.set_up(row, self._make_constraint(sampling, output))
        if wishes.is_penalized:
            self._counts.fill(row, setup.token_ids[: setup.num_prompt_tokens], output)
        else:
            self._counts.drop(row)

    def draw(self, logits: Tensor, rows: Sequence[int]) -> Draws:
        """Draw one token per row and move the rows' state on.

        Waits for the device only where a row is constrained: for the token it drew last. An error
        leaves all rows where they were, so that the call may be repeated. Where memory is refused
        behind the draw itself, the lines concerned have an error among the draws.

        Args:
            logits: float [num_draws, vocab_size], line i for rows[i]; constrained rows' lines are
                masked in place, the others left as they are.
            rows: distinct rows, each set up before.
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows))
        assert logits.dtype in LOGITS_DTYPES, logits.dtype
        followers = self._constrained.mask(logits, rows)
        batch = self._batch_of(tuple(rows))
        edited = self._edit(logits, batch)  # [num_draws, vocab_size]
        drawn = self.backend.draw_rows(
            edited, batch.rows, self._settings, batch.max_top_k
        )  # [2, num_draws]
        token_ids = drawn[0]  # [num_draws]
        errors: dict[int, str] = {}
        self._drawn_scores.count(self._counts.generated, token_ids, batch, errors)
        scores, num_top = self._drawn_scores.score(logits, token_ids, batch, errors)
        draws = Draws(tuple(rows), drawn, num_top, scores, followers, errors)
        self._constrained.expect(draws)
        return draws

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
            scores = self.backend.score_tokens(part, token_ids, num_top)
            columns = (column.tolist() for column in (token_ids, *scores))
            for token_id, logprob, rank, top_ids, top in zip(*columns, strict=True):
                scored.append(token_logprobs(token_id, logprob, rank, top_ids, top, num_top))
        return tuple(scored)

    def _edit(self, logits: Tensor, batch: DrawBatch) -> Tensor:
        if not batch.is_edited:
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

    def _penalize(self, logits: Tensor, group: Lines, count_slots: Tensor | None) -> Tensor:
        return self.backend.penalize(
            group.take(logits),
            self._counts.in_prompt[count_slots],
            self._counts.generated[count_slots],
            self._repetition[group.rows],
            self._presence[group.rows],
            self._frequency[group.rows],
        )

    def _batch_of(self, rows: tuple[int, ...]) -> DrawBatch:
        if rows not in self._batches:
            self._batches.clear()
            wishes = [self._wishes[row] for row in rows]
            self._batches[rows] = self._maker.group(rows, wishes, self._counts.slots)
        return self._batches[rows]

    def _zeros(self, max_rows: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(max_rows, dtype=dtype, device=self.device)


def _fold_to_int64(seed: int) -> int:
    """Any integer onto 64 signed bits; what fits stays distinct."""
    return (seed + 2**63) % 2**64 - 2**63
