"""One step's drawn tokens: on the device, on their way to the host, and as plain values.

Knows nothing of how a token is drawn.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from zipage_lang.runtime.constraint import Followers, Standing
from zipage_lang.runtime.out_of_memory import is_out_of_memory
from zipage_lang.runtime.step_plan import Sample, TokenLogprobs

NO_TOKEN = (
    "no token could be drawn: the logits hold NaN or infinity, or every token is suppressed; check "
    "the model's weights, min_tokens with stop_token_ids, and logit_bias"
)
IMPOSSIBLE = -3e38  # `score_tokens` reports a probability of 0 as float32's lowest number
Scores = tuple[Tensor, Tensor, Tensor, Tensor]  # what `score_tokens` returns
SCORE_COLUMNS = 4


@dataclasses.dataclass(slots=True)
class Draws:
    """Drawn tokens and what is known of them, line i for rows[i]."""

    rows: tuple[int, ...]
    drawn: Tensor  # int64 [2, num_draws], on the device: token ids, and 1 where there was none
    num_top: tuple[int | None, ...]  # per draw; None: it has no scores
    scores: tuple[Scores, ...]  # of the draws that have some, in their order, in parts
    followers: Followers | None = None  # None: no line is constrained
    errors: Mapping[int, str] = dataclasses.field(default_factory=dict)  # by line, known already
    _host: tuple[Tensor, ...] | None = None
    _copied: torch.cuda.Event | None = None

    @property
    def token_ids(self) -> Tensor:
        """int64 [num_draws], on the device."""
        return self.drawn[0]

    def start_copy(self) -> None:
        """Send all to the host behind what was launched so far, without waiting for it.

        Where the host has no pinned memory, they are read from the device when they are needed.
        """
        if self.drawn.device.type == "cpu":
            return
        try:
            self._host = tuple(_to_pinned(part) for part in self._parts())
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return
        self._copied = torch.cuda.current_stream().record_event()

    def settle(self) -> None:
        """Wait for the tokens and tell those who follow them; later calls do nothing."""
        if self.followers is not None:
            self.followers.tell(*self._arrived()[0].tolist())

    def samples(self) -> tuple[Sample, ...]:
        """The draws as plain values: the step's one wait for the device.

        A row whose logits held a NaN or +inf, or that had no token left to draw, gets an error; so
        does one with an error that was known before.
        """
        (token_ids, is_broken), *scores = (part.tolist() for part in self._arrived())
        if not scores and not any(is_broken):
            samples = list(map(Sample, self.rows, token_ids))
        else:
            starts = range(0, len(scores), SCORE_COLUMNS)
            parts = (scores[start : start + SCORE_COLUMNS] for start in starts)
            scored = (line for part in parts for line in zip(*part, strict=True))
            lines = zip(self.rows, token_ids, is_broken, self.num_top, strict=True)
            samples = [_sample(*line, scored) for line in lines]
        if self.followers is not None:
            for line, standing in self.followers.tell(token_ids, is_broken).items():
                samples[line] = _with_standing(samples[line], standing)
        for line, error in self.errors.items():
            samples[line] = Sample(self.rows[line], token_ids[line], error=error)
        return tuple(samples)

    def _arrived(self) -> tuple[Tensor, ...]:
        """All parts on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._parts() if self._host is None else self._host

    def _parts(self) -> tuple[Tensor, ...]:
        return (self.drawn, *itertools.chain.from_iterable(self.scores))


def token_logprobs(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    num_top: int,
) -> TokenLogprobs:
    """One line of `Scores` as plain values; its top part may be wider than `num_top`."""
    top = tuple(zip(top_ids[:num_top], top_logprobs[:num_top], strict=True))
    return TokenLogprobs(token_id, logprob, rank, top)


def _to_pinned(part: Tensor) -> Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)


def _sample(
    row: int,
    token_id: int,
    is_broken: int,
    num_top: int | None,
    scored: Iterator[tuple[float, int, list[int], list[float]]],
) -> Sample:
    """Takes a line of `scored` where the draw has one."""
    scores = None if num_top is None else token_logprobs(token_id, *next(scored), num_top)
    if is_broken:
        return Sample(row, token_id, error=NO_TOKEN)
    return Sample(row, token_id, scores)


def _with_standing(sample: Sample, standing: Standing) -> Sample:
    return msgspec.structs.replace(
        sample,
        error=standing.error or sample.error,  # the former knows the cause
        logprobs=None if sample.logprobs is None else _without_impossible(sample.logprobs),
        num_thinking=standing.num_thinking,
        is_complete=standing.is_complete,
    )


def _without_impossible(logprobs: TokenLogprobs) -> TokenLogprobs:
    """Tokens that were masked out do not count among the likeliest, however few there are."""
    top = tuple(pair for pair in logprobs.top if pair[1] > IMPOSSIBLE)
    return dataclasses.replace(logprobs, top=top)
