"""What only a card can show of the training: its attention, and the compiled layers."""

import pytest
import torch
from attention import attend_by_document, attend_by_kernel, choose_attention
from generation import write_solutions
from packing import BatchSize, draw_batch
from reasoner import Reasoner, Shape
from transfer import to_device

CARD = torch.device("cuda")
SIZE = BatchSize(num_tokens=4096, max_documents=256, context=256)
SHAPE = Shape(vocab_size=128, num_layers=2, context=256)

pytestmark = pytest.mark.gpu


def make_model(attend, parameter_dtype=torch.float32):
    model = Reasoner(SHAPE, attend, torch.bfloat16)
    model.initialize(1)
    return model.to(CARD, parameter_dtype)


def test_the_kernel_is_chosen():
    assert choose_attention(CARD, print) is attend_by_kernel


def test_compiled_layers_give_the_loss_and_gradients_of_plain_ones(source):
    batch = to_device(draw_batch(source, SIZE, [1, 1, 1, 1], 1, 1), CARD)
    results = []
    for attend in (attend_by_document, attend_by_kernel):
        model = make_model(attend)
        if attend is attend_by_kernel:
            for layer in model.layers:
                layer.compile(dynamic=False)
        losses = model.token_losses(model(batch.tokens, batch.starts), batch.targets)
        loss = (losses * batch.counted).sum() / batch.counted.sum()
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()]))
    (loss, gradients), (other_loss, other_gradients) = results
    torch.testing.assert_close(loss, other_loss, rtol=2e-3, atol=2e-3)
    for one, other in zip(gradients, other_gradients, strict=True):
        assert (one - other).norm() < 0.05 * one.norm()


def test_writing_on_a_card_ends_within_the_context():
    model = make_model(attend_by_document, torch.bfloat16)
    written = write_solutions(model, ["back abc\n", "front a\n"], 0.6, seed=1, limit_s=60)
    assert all(len(one.text) < SHAPE.context for one in written)
