"""Draws problems and packs their texts into batches of one fixed size.

Runs in worker processes. Knows nothing of torch, models or of how cells are weighted.
"""

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, encode_text

from zipage_lang.evaluation.families.family import Family, Problem, problem_rng

Cell = tuple[str, int]
"""A family's name and one of its levels."""

NO_CELL = -1


@dataclasses.dataclass(frozen=True)
class Document:
    """One training text as ids, where its solution begins, and the cell it was drawn from."""

    ids: bytes
    solution_start: int  # index of the solution's first character in `ids`
    cell: int


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Documents side by side, and padding behind them as documents of its own."""

    tokens: NDArray[np.uint8]  # [num_tokens]
    targets: NDArray[np.uint8]  # [num_tokens], the token that follows in the same document
    counted: NDArray[np.bool_]  # [num_tokens], whether the target is of a solution
    starts: NDArray[np.int32]  # [max_documents + 1]
    cells: NDArray[np.int32]  # [max_documents], NO_CELL for padding


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """What all batches of a run have in common."""

    num_tokens: int
    max_documents: int  # padding's count too
    context: int  # tokens of the longest document there may be

    def num_paddings(self, num_free: int) -> int:
        """Documents of padding that fill `num_free` tokens."""
        return -(-num_free // self.context)


@dataclasses.dataclass(frozen=True)
class Source:
    """What problems are drawn from; it stays the same for a whole run."""

    families: Mapping[str, Family]
    cells: tuple[Cell, ...]

    def problem(self, rng: random.Random, cell: int) -> Problem:
        family, level = self.cells[cell]
        return self.families[family].draw(rng, level)


def source_of(families: Mapping[str, Family]) -> Source:
    """A source of all levels of these families."""
    cells = ((name, level) for name in families for level in range(families[name].levels))
    return Source(families, tuple(cells))


def document_of(problem: Problem, cell: int) -> Document:
    """A whole training text between its special tokens."""
    ids = encode_text(problem.prompt + problem.solution)
    assert UNK_ID not in ids, f"a character of {problem.prompt!r} or its solution has no token"
    return Document(bytes([BOS_ID, *ids, EOS_ID]), 1 + len(problem.prompt), cell)


def draw_batch(
    source: Source, size: BatchSize, weights: Sequence[float], seed: int, index: int
) -> PackedBatch:
    """A batch of fresh problems, cells drawn by `weights`; the same for the same arguments."""
    rng = problem_rng("train", seed, index)
    documents: list[Document] = []
    free = size.num_tokens
    while len(documents) + 1 + size.num_paddings(free) <= size.max_documents:
        cell = rng.choices(range(len(source.cells)), weights)[0]
        document = document_of(source.problem(rng, cell), cell)
        if len(document.ids) > free:
            break
        documents.append(document)
        free -= len(document.ids)
    assert documents, f"no document fits into {size}"
    return pack(documents, size)


def pack(documents: Sequence[Document], size: BatchSize) -> PackedBatch:
    """Documents as one batch; they must fit."""
    lengths = [len(document.ids) for document in documents]
    assert all(length <= size.context for length in lengths), (max(lengths), size.context)
    free = size.num_tokens - sum(lengths)
    num_used = len(lengths) + size.num_paddings(free)
    assert free >= 0, (free, size)
    assert num_used <= size.max_documents, (num_used, size)
    tokens = np.full(size.num_tokens, PAD_ID, np.uint8)
    targets = np.full(size.num_tokens, PAD_ID, np.uint8)
    counted = np.zeros(size.num_tokens, np.bool_)
    starts = np.full(size.max_documents + 1, size.num_tokens, np.int32)
    cells = np.full(size.max_documents, NO_CELL, np.int32)
    start = 0
    for index, document in enumerate(documents):
        end = start + len(document.ids)
        tokens[start:end] = np.frombuffer(document.ids, np.uint8)
        targets[start : end - 1] = tokens[start + 1 : end]
        # The token at i predicts the one at i + 1.
        counted[start + document.solution_start - 1 : end - 1] = True
        starts[index], cells[index] = start, document.cell
        start = end
    starts[len(documents) : num_used] = range(start, size.num_tokens, size.context)
    return PackedBatch(tokens, targets, counted, starts, cells)


def pack_all(documents: Iterable[Document], size: BatchSize) -> list[PackedBatch]:
    """As many batches as the documents need, in their order."""
    batches: list[PackedBatch] = []
    waiting: list[Document] = []
    free = size.num_tokens
    for document in documents:
        num_used = len(waiting) + 1 + size.num_paddings(free)
        if len(document.ids) > free or num_used > size.max_documents:
            batches.append(pack(waiting, size))
            waiting, free = [], size.num_tokens
        waiting.append(document)
        free -= len(document.ids)
    return [*batches, pack(waiting, size)] if waiting else batches
