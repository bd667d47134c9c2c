"""What is done with tokens once they are drawn: log-probabilities, counts for penalties.

A draw can't be taken back, so a line that finds no memory here gets an error of its own instead of
drawing again. Knows nothing of how a token is drawn.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.draw_batch import DrawBatch, Lines
from zipage_lang.runtime.draws import Scores
from zipage_lang.runtime.out_of_memory import Result, Retries, halved, no_memory_left


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnScores:
    """Works on all lines at once, and where memory is refused on fewer at a time."""

    backend: Backend
    retries: Retries

    def score(
        self, logits: Tensor, token_ids: Tensor, batch: DrawBatch, errors: dict[int, str]
    ) -> Scores | None:
        """Log-probabilities of the lines that ask for them; None where none does.

        A line that finds no memory gets an entry in `errors`, and scores that mean nothing.

        Args:
            logits: float [num_draws, vocab_size].
            token_ids: int64 [num_draws].
        """
        lines = batch.scored
        if lines is None:
            return None
        num_top = max(num for num in batch.num_top if num is not None)

        def score(part: range) -> tuple[int, Scores]:
            values = (_take(lines, part, logits), _take(lines, part, token_ids))
            return part.start, self.backend.score_tokens(*values, num_top)

        done, lost = self._in_parts(lines, score, errors)
        if len(done) == 1 and not lost:
            return done[0][1]
        width = min(num_top, logits.shape[1])
        done += [(index, _no_scores(width, logits.device)) for index in lost]
        columns = zip(*(scores for _, scores in sorted(done, key=_start)), strict=True)
        logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in columns)
        return logprobs, ranks, top_ids, top_logprobs

    def count(
        self, counts: Tensor, token_ids: Tensor, batch: DrawBatch, errors: dict[int, str]
    ) -> None:
        """Count the tokens of penalised lines; one that finds no memory gets an entry in `errors`.

        Args:
            counts: int32 [num_slots, vocab_size], written.
            token_ids: int64 [num_draws].
        """
        lines, slots = batch.penalized, batch.count_slots
        if lines is None or slots is None:
            return

        def count(part: range) -> None:
            counts[slots[part.start : part.stop], _take(lines, part, token_ids)] += 1

        self._in_parts(lines, count, errors)

    def _in_parts(
        self, lines: Lines, work: Callable[[range], Result], errors: dict[int, str]
    ) -> tuple[list[Result], list[int]]:
        """What the parts yielded, and which of the lines found no memory, by index into them."""
        lost: list[int] = []
        done = self.retries.run(range(len(lines.lines)), work, halved, lost.extend)
        if lost:
            places = lines.lines.tolist()
            errors.update((places[index], no_memory_left(lines.lines.device)) for index in lost)
        return done, lost


def _take(lines: Lines, part: range, values: Tensor) -> Tensor:
    """Of some of the lines; of all of them without a copy where they are the whole batch."""
    if len(part) == len(lines.lines):
        return lines.take(values)
    return values[lines.lines[part.start : part.stop]]


def _no_scores(num_top: int, device: torch.device) -> Scores:
    """Of one line."""
    logprobs = torch.zeros(1, dtype=torch.float32, device=device)
    ranks = torch.zeros(1, dtype=torch.int64, device=device)
    return logprobs, ranks, ranks.expand(1, num_top), logprobs.expand(1, num_top)


def _start(part: tuple[int, Scores]) -> int:
    return part[0]
