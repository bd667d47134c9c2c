"""What is done with tokens once they are drawn: log-probabilities, counts for penalties.

A draw can't be taken back, so a line that finds no memory here gets an error of its own instead of
drawing again. Knows nothing of how a token is drawn.
"""

import dataclasses
from collections.abc import Callable

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
    ) -> tuple[tuple[Scores, ...], tuple[int | None, ...]]:
        """Log-probabilities of the lines that ask for them, in parts and in order.

        A line that finds no memory gets an entry in `errors` and no scores. The parts are left as
        they are: to join them would take memory, and a refusal would have the lines drawn again.

        Args:
            logits: float [num_draws, vocab_size].
            token_ids: int64 [num_draws].

        Returns:
            The parts, and of each line how many likeliest tokens its scores name; None: no scores.
        """
        lines = batch.scored
        if lines is None:
            return (), batch.num_top
        num_top = max(num for num in batch.num_top if num is not None)

        def score(part: range) -> Scores:
            values = (_take(lines, part, logits), _take(lines, part, token_ids))
            return self.backend.score_tokens(*values, num_top)

        done, lost = self._in_parts(lines, score, errors)
        found = list(batch.num_top)
        for line in lost:
            found[line] = None
        return tuple(done), tuple(found)

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
        """What the parts yielded, in order, and which of the batch's lines found no memory."""
        without: list[int] = []  # index into lines
        done = self.retries.run(range(len(lines.lines)), work, halved, without.extend)
        if not without:
            return done, []
        places = lines.lines.tolist()
        lost = [places[index] for index in without]
        errors.update((line, no_memory_left(lines.lines.device)) for line in lost)
        return done, lost


def _take(lines: Lines, part: range, values: Tensor) -> Tensor:
    """Of some of the lines; of all of them without a copy where they are the whole batch."""
    if len(part) == len(lines.lines):
        return lines.take(values)
    return values[lines.lines[part.start : part.stop]]
