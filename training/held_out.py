"""How often the model writes a held-out solution without a slip, measured without writing it.

Given the right text so far, each next token is either the most likely one or not, and has some
probability at a temperature. A solution whose every token is the most likely is what greedy
decoding would write; the product of the probabilities is how often sampling would write exactly
this text. So one forward pass over held-out solutions tells what thousands of decoding steps would
(a lower bound of accuracy, where other texts are right too). Knows nothing of training or of how
texts are drawn.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from packing import NO_CELL, BatchSize, Document, Source, document_of, pack_all
from reasoner import Reasoner, documents_of
from tokenizer import CHARACTERS, SPECIAL_TOKENS
from torch import Tensor
from transfer import DeviceBatch, to_device

from zipage_lang.evaluation.families.family import Problem, problem_rng

TEMPERATURE = 0.6
CONTEXT_SHOWN = 60  # characters


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out problems and their cells, the same for all pieces of a run."""

    problems: tuple[Problem, ...]
    cells: tuple[int, ...]

    def documents(self) -> list[Document]:
        return [document_of(*pair) for pair in zip(self.problems, self.cells, strict=True)]


@dataclasses.dataclass(frozen=True)
class CellScore:
    """Of one family and level: shares of solutions that are exact."""

    greedy: float
    sampled: float  # expected at TEMPERATURE
    num_problems: int


def draw_held_out(source: Source, seed: int, per_family: int) -> HeldOut:
    """About `per_family` problems of each family, spread evenly over its levels."""
    families = [family for family, _ in source.cells]
    cells = [
        cell
        for cell, family in enumerate(families)
        for _ in range(max(1, per_family // families.count(family)))
    ]
    problems = [
        source.problem(problem_rng("held-out", seed, index), cell)
        for index, cell in enumerate(cells)
    ]
    return HeldOut(tuple(problems), tuple(cells))


class ExactnessCheck:
    """Scores a model on the same held-out documents again and again."""

    def __init__(
        self, held_out: HeldOut, num_cells: int, size: BatchSize, device: torch.device
    ) -> None:
        self._num_cells = num_cells
        # On the host between checks, so that the card's memory is all the training's.
        self._batches, self._device = pack_all(held_out.documents(), size), device

    def score(self, model: Reasoner) -> list[CellScore]:
        """One score per cell."""
        sums = torch.zeros(3, self._num_cells, device=self._device)
        for batch in self._on_device():
            logits = _logits(model, batch)  # [num_tokens, vocab_size]
            slips = _per_document(batch, logits.argmax(-1) != batch.targets)
            log_probs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
            chosen = log_probs.gather(1, batch.targets[:, None]).squeeze(1)  # [num_tokens]
            exact = torch.stack(
                [slips == 0, _per_document(batch, chosen).exp(), torch.ones_like(slips)]
            )  # [3, max_documents]
            real = batch.cells != NO_CELL
            sums.index_add_(1, batch.cells[real], exact[:, real].float())
        greedy, sampled, counts = sums.tolist()
        return [
            CellScore(right / max(1, count), likely / max(1, count), int(count))
            for right, likely, count in zip(greedy, sampled, counts, strict=True)
        ]

    def first_slips(self, model: Reasoner) -> dict[int, str]:
        """Per cell, the text before the first token of a solution that would be another."""
        found: dict[int, str] = {}
        for batch in self._on_device():
            predicted = _logits(model, batch).argmax(-1)
            wrong = ((predicted != batch.targets) & batch.counted).nonzero().squeeze(1).tolist()
            documents = documents_of(batch.starts, batch.tokens.shape[0]).tolist()
            cells, starts = batch.cells.tolist(), batch.starts.tolist()
            for place in wrong:
                cell, start = cells[documents[place]], starts[documents[place]]
                if cell not in found:
                    found[cell] = _describe(
                        batch, predicted, max(start, place - CONTEXT_SHOWN), place
                    )
        return found

    def _on_device(self) -> Iterator[DeviceBatch]:
        return (to_device(batch, self._device) for batch in self._batches)


def summarize(
    scores: Sequence[CellScore], source: Source, value: Callable[[CellScore], float]
) -> dict[str, list[float]]:
    """Family -> one value per level."""
    table: dict[str, list[float]] = {}
    for (family, _), score in zip(source.cells, scores, strict=True):
        table.setdefault(family, []).append(round(value(score), 4))
    return table


def _logits(model: Reasoner, batch: DeviceBatch) -> Tensor:
    # With gradients on, so that the layers compiled for training serve here too.
    hidden = model(batch.tokens, batch.starts)
    with torch.no_grad():
        return model.logits(hidden.detach())


def _per_document(batch: DeviceBatch, values: Tensor) -> Tensor:
    """Sums over each document's counted tokens; values [num_tokens] -> [max_documents]."""
    documents = documents_of(batch.starts, values.shape[0])
    sums = torch.zeros(batch.cells.shape[0], device=values.device)
    return sums.index_add_(0, documents, values.float() * batch.counted)


def _describe(batch: DeviceBatch, predicted: Tensor, start: int, place: int) -> str:
    before = _text(batch.tokens[start : place + 1].tolist())
    wanted, got = (_text([int(ids[place])]) for ids in (batch.targets, predicted))
    return f"{before!r} then {got!r} instead of {wanted!r}"


def _text(ids: list[int]) -> str:
    names = [*SPECIAL_TOKENS, *CHARACTERS]
    return "".join(names[token_id] if token_id < len(names) else "?" for token_id in ids)
