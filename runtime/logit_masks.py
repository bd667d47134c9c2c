"""Rows whose next token depends on the ones before: follows their draws and masks their logits.

With a step in flight, a row's mask needs the token that the step before is still drawing. So a
step's forward pass is launched first; then the tokens of constrained rows are waited for, and the
masks are made on the CPU while the forward pass runs.
Knows nothing of requests or of how a constraint decides.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zipage_lang.runtime.constraint import Constraint, Followers
from zipage_lang.runtime.device_copy import send_array, send_ints
from zipage_lang.runtime.draws import Draws
from zipage_lang.runtime.token_bits import num_words

MASKED_LINES = 32  # lines masked at a time; bounds the vocabulary-wide temporaries


class ConstrainedRows:
    """The constraints of rows, and the latest draws that they have not heard of."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._by_row: dict[int, Constraint] = {}
        self._latest: Draws | None = None

    def set_up(self, row: int, constraint: Constraint | None) -> None:
        """A request takes the row."""
        self._by_row.pop(row, None)
        if constraint is not None and not constraint.is_free:
            self._by_row[row] = constraint

    def mask(self, logits: Tensor, rows: Sequence[int]) -> Followers | None:
        """Set what may not be drawn to -inf, in place; who is to hear of the draws.

        Waits for the tokens that the step before draws where one of `rows` needs them; otherwise
        does nothing and returns None.

        Args:
            logits: float [num_draws, vocab_size], line i for rows[i].
        """
        if not self._by_row or self._by_row.keys().isdisjoint(rows):
            return None
        if self._latest is not None:
            self._latest.settle()
            self._latest = None
        self._by_row = {row: kept for row, kept in self._by_row.items() if not kept.is_free}
        by_line = {line: self._by_row[row] for line, row in enumerate(rows) if row in self._by_row}
        if not by_line:
            return None
        self._apply(logits, by_line)
        return Followers(by_line)

    def expect(self, draws: Draws) -> None:
        """These draws are on their way; their followers hear of them when it matters."""
        if draws.followers is not None:
            self._latest = draws

    def _apply(self, logits: Tensor, by_line: dict[int, Constraint]) -> None:
        bits = torch.full((len(by_line), num_words(self._vocab_size)), -1, dtype=torch.int32)
        masked = [
            (index, line)
            for index, (line, constraint) in enumerate(by_line.items())
            if constraint.fill(bits, index)
        ]
        words = bits.numpy()  # [num_constrained, num_words]
        for start in range(0, len(masked), MASKED_LINES):
            indices, lines = zip(*masked[start : start + MASKED_LINES], strict=True)
            mask_lines(logits, lines, words[list(indices)])


def mask_lines(logits: Tensor, lines: Sequence[int], words: np.ndarray) -> None:
    """Set the tokens whose bits are not set to -inf, in place.

    Args:
        logits: float [num_draws, vocab_size].
        lines: distinct lines of it.
        words: int32 [len(lines), num_words], bit i % 32 of word i // 32 is token i.
    """
    parts = send_array(words.view(np.uint8), logits.device)  # [num_lines, num_words * 4]
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)  # [8]
    is_set = (parts[:, :, None] >> shifts) & 1  # [num_lines, num_words * 4, 8]
    is_masked = is_set.flatten(1)[:, : logits.shape[1]] == 0  # [num_lines, vocab_size]
    index = send_ints(lines, logits.device)  # [num_lines]
    logits[index] = logits[index].masked_fill_(is_masked, float("-inf"))
