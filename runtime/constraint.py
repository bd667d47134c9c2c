"""What one output may go on with: its thinking, then its grammar, followed token by token.

Knows nothing of logits, rows or steps.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from zipage_lang.runtime.think_state import Phase, ThinkState
from zipage_lang.runtime.token_bits import pack

REFUSED = "the grammar does not allow the token that was drawn; this is an error of the engine"
UNSPELT = "no token of this model spells what the grammar asks for next; change the grammar"
MAX_STEP_S = 0.5  # CPU time for one token of one output, which all others wait for
MAX_MEAN_S = 0.003  # the same on average, behind the first FREE_S seconds of an output
FREE_S = 1.0
TOO_SLOW = (
    f"the grammar can be read in too many ways: one token took over {MAX_STEP_S} s, or all of them "
    f"over {MAX_MEAN_S} s on average; make it less ambiguous"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Where an output stands behind a token."""

    num_thinking: int | None = None  # None: thinking is not watched
    is_complete: bool = False  # the grammar has ended: so has the output
    error: str | None = None


class Constraint:
    """One output's. Made again from its tokens whenever its request takes a row.

    While thinking nothing but thinking is constrained; the grammar starts with the answer. Behind a
    tool start it goes on from the tag where it allows the tag, else it starts behind it.
    """

    def __init__(
        self,
        think: ThinkState | None,
        matcher: Any,
        *,
        eos_token_ids: Sequence[int],
        held_back: Sequence[int],
        min_tokens: int,
        vocab_size: int,
    ) -> None:
        """matcher: xgrammar.GrammarMatcher, or None where the answer is free.
        held_back: tokens that end the output, not before min_tokens unless nothing else is left."""
        self._think, self._matcher = think, matcher
        self._eos = pack(eos_token_ids, vocab_size)
        self._held_back = pack(held_back, vocab_size)
        self._min_tokens, self._vocab_size = min_tokens, vocab_size
        self._num_output = 0
        self._spent_s = 0.0
        self._can_answer = matcher is not None  # while opening: what was drawn fits the grammar
        self._error: str | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is left to constrain."""
        return self._matcher is None and self._is_answering

    @property
    def standing(self) -> Standing:
        num_thinking = None if self._think is None else self._think.num_thinking
        return Standing(num_thinking, self._has_ended, self._error)

    def fill(self, bits: Tensor, index: int) -> bool:
        """Write into bits[index] which tokens may come next; False where all may.

        Args:
            bits: int32 [num_lines, num_words] on the CPU, the line all ones.
        """
        started = time.thread_time()
        is_masked = self._fill(bits, index)
        self._note_time(started)
        return is_masked

    def accept(self, token_id: int) -> None:
        """The token that was drawn."""
        started = time.thread_time()
        self._num_output += 1
        if not self._is_answering:
            self._accept_thinking(token_id)
        elif self._matcher is not None and not self._has_ended and self._error is None:
            self._error = None if self._matcher.accept_token(token_id) else REFUSED
        self._note_time(started)

    def _note_time(self, started: float) -> None:
        took_s = time.thread_time() - started
        self._spent_s += took_s
        is_slow = self._spent_s > FREE_S + MAX_MEAN_S * self._num_output
        if (took_s > MAX_STEP_S or is_slow) and self._error is None:
            self._error = TOO_SLOW

    def _fill(self, bits: Tensor, index: int) -> bool:
        words = bits[index].numpy()  # [num_words], a view
        if not self._is_answering:
            return self._fill_thinking(bits, index, words)
        if self._matcher is None or self._has_ended or self._error is not None:
            return False
        self._matcher.fill_next_token_bitmask(bits, index)
        self._hold_back(words)
        if not words.any():
            self._error = UNSPELT
        return True

    @property
    def _is_answering(self) -> bool:
        return self._think is None or self._think.phase is Phase.ANSWER

    @property
    def _has_ended(self) -> bool:
        return self._matcher is not None and bool(self._matcher.is_terminated())

    def _fill_thinking(self, bits: Tensor, index: int, words: np.ndarray) -> bool:
        think = self._think
        assert think is not None
        if think.forced is not None:
            words[:] = pack([think.forced], self._vocab_size)
            return True
        if think.phase is Phase.OPENING:
            return self._fill_opening(bits, index, words)
        banned = think.banned()
        if think.is_floored or self._matcher is not None:
            banned = banned | self._eos
        if self._matcher is not None and self._num_output < self._min_tokens:
            banned = banned | self._held_back
        words &= ~banned
        return bool(banned.any())

    def _fill_opening(self, bits: Tensor, index: int, words: np.ndarray) -> bool:
        """The start tag, or the answer at once."""
        think = self._think
        assert think is not None
        if self._matcher is None:
            return False
        if self._can_answer:
            self._matcher.fill_next_token_bitmask(bits, index)
            self._hold_back(words)
        else:
            words[:] = 0
        words |= think.opening_tokens()
        return True

    def _accept_thinking(self, token_id: int) -> None:
        think, matcher = self._think, self._matcher
        assert think is not None
        was_opening = think.phase is Phase.OPENING
        if was_opening and self._can_answer:
            self._can_answer = bool(matcher.accept_token(token_id))
        think.accept(token_id)
        if matcher is None or think.phase is Phase.OPENING:
            return
        if was_opening and think.phase is Phase.ANSWER:
            self._error = None if self._can_answer else REFUSED
            return
        if was_opening:
            matcher.reset()
        if think.phase is Phase.ANSWER and think.answer_start:
            self._take_answer_start(think.answer_start)

    def _take_answer_start(self, text: bytes) -> None:
        if not self._matcher.accept_string(text):
            self._matcher.reset()

    def _hold_back(self, words: np.ndarray) -> None:
        """Tokens that end the output wait for min_tokens, unless no other would be left."""
        if self._num_output < self._min_tokens:
            kept = words & ~self._held_back
            if kept.any():
                words[:] = kept


@dataclasses.dataclass(slots=True)
class Followers:
    """The constrained lines of one step's draws."""

    constraints: dict[int, Constraint]  # by line
    standings: dict[int, Standing] | None = None  # None: the tokens have not been told yet

    def tell(self, token_ids: Sequence[int], is_broken: Sequence[int]) -> dict[int, Standing]:
        """Tell the constraints what was drawn, once; where each line stands.

        Where a line is broken nothing was drawn, and there is nothing to tell.
        """
        if self.standings is None:
            self.standings = {}
            for line, constraint in self.constraints.items():
                if not is_broken[line]:
                    constraint.accept(token_ids[line])
                self.standings[line] = constraint.standing
        return self.standings
