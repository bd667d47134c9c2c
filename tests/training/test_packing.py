"""A packed batch says what its documents say one by one, and equal seeds draw equal batches."""

import random

import numpy as np
import pytest
import torch
from held_out import draw_held_out
from packing import NO_CELL, BatchSize, document_of, draw_batch, pack, pack_all
from tokenizer import BOS_ID, EOS_ID, PAD_ID
from transfer import to_device

CPU = torch.device("cpu")


@pytest.fixture
def documents(source):
    rng = random.Random(3)
    return [document_of(source.problem(rng, cell), cell) for cell in (0, 1, 2, 3, 1, 0)]


def losses_of(model, batch):
    """Losses of all tokens, and the batch they are of."""
    moved = to_device(batch, CPU)
    return model.token_losses(model(moved.tokens, moved.starts), moved.targets), moved


def test_losses_of_a_packed_batch_equal_those_of_its_documents_alone(model, documents, size):
    packed, moved = losses_of(model, pack(documents, size))
    alone = [losses_of(model, pack([document], size)) for document in documents]
    expected = torch.cat([losses[batch.counted] for losses, batch in alone])
    assert len(expected) == sum(len(d.ids) - d.solution_start for d in documents)
    torch.testing.assert_close(packed[moved.counted], expected)


def test_another_document_in_front_changes_nothing_and_the_own_prompt_does(model, documents, size):
    def last_losses(first, last):
        losses, batch = losses_of(model, pack([first, last], size))
        return losses[batch.counted][-len(last.ids) + last.solution_start :]

    usual = last_losses(documents[0], documents[3])
    torch.testing.assert_close(last_losses(documents[1], documents[3]), usual)
    own = bytearray(documents[3].ids)
    own[-10] = own[-10] % 90 + 5
    changed = type(documents[3])(bytes(own), documents[3].solution_start, 3)
    assert not torch.allclose(last_losses(documents[0], changed), usual)


def test_counted_targets_are_the_solution_and_the_end(source, size):
    problem = source.problem(random.Random(1), 1)
    batch = pack([document_of(problem, 1)], size)
    text_len = len(problem.prompt) + len(problem.solution) + 2
    assert batch.tokens[0] == BOS_ID
    assert batch.tokens[text_len - 1] == EOS_ID
    assert batch.counted.sum() == len(problem.solution) + 1
    counted = batch.targets[batch.counted]
    assert counted[-1] == EOS_ID
    assert (
        bytes(counted[:-1])
        == bytes(batch.tokens[text_len - 1 - len(problem.solution) : -1])[: len(problem.solution)]
    )


def test_padding_is_cut_into_documents_no_longer_than_the_context(documents, size):
    batch = pack(documents[:2], size)
    lengths = np.diff(batch.starts)
    assert lengths.sum() == size.num_tokens
    assert lengths.max() == size.context
    assert list(batch.cells[:3]) == [0, 1, NO_CELL]
    assert (batch.tokens[batch.starts[2] :] == PAD_ID).all()
    assert not batch.counted[batch.starts[2] :].any()


def test_a_batch_is_the_same_for_the_same_seed_and_index_only(source, size):
    def tokens(seed, index):
        return draw_batch(source, size, [1, 1, 1, 1], seed, index).tokens.tobytes()

    assert tokens(1, 5) == tokens(1, 5)
    assert len({tokens(1, 5), tokens(1, 6), tokens(2, 5)}) == 3


def test_cells_without_weight_are_not_drawn_and_batches_are_full(source, size):
    batch = draw_batch(source, size, [0, 1, 0, 1], 1, 1)
    assert set(batch.cells) == {1, 3, NO_CELL}
    assert batch.starts[list(batch.cells).index(NO_CELL)] > size.num_tokens - 30


def test_few_slots_end_a_batch_before_its_tokens_do(source):
    size = BatchSize(num_tokens=512, max_documents=9, context=128)
    batch = draw_batch(source, size, [1, 1, 1, 1], 1, 1)
    assert (batch.cells != NO_CELL).sum() == 5  # the other four hold the padding


def test_packing_many_documents_keeps_all_in_order(source, size):
    held_out = draw_held_out(source, 1, 120)
    documents = held_out.documents()
    batches = pack_all(documents, size)
    assert len(batches) > 1
    cells = [cell for batch in batches for cell in batch.cells if cell != NO_CELL]
    assert cells == [document.cell for document in documents]
