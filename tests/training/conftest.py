"""Makes the training scripts importable as they import each other; small parts of a training."""

import dataclasses
import pathlib
import random
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "training"))

from attention import attend_by_document
from packing import BatchSize, Source, source_of
from reasoner import Reasoner, Shape

from zipage_lang.evaluation.families.family import Problem

SHAPE = Shape(
    vocab_size=128,
    hidden_size=32,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    context=128,
)


@dataclasses.dataclass(frozen=True)
class Reversal:
    """A family small enough for tests: the solution is the prompt's letters from the back."""

    name: str
    levels: int = 2

    def draw(self, rng: random.Random, level: int) -> Problem:
        letters = "".join(rng.choices("abcdefgh", k=rng.randint(1, 4) + 4 * level))
        return Problem(self.name, f"{self.name} {letters}\n", letters[::-1], letters[::-1])

    def check(self, answer: str, output: str) -> bool:
        return output == answer


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shape() -> Shape:
    return SHAPE


@pytest.fixture
def source() -> Source:
    return source_of({name: Reversal(name) for name in ("back", "front")})


@pytest.fixture
def size() -> BatchSize:
    return BatchSize(num_tokens=512, max_documents=64, context=SHAPE.context)


@pytest.fixture
def model() -> Reasoner:
    model = Reasoner(SHAPE, attend_by_document, torch.float32)
    model.initialize(1)
    with torch.no_grad():  # far from zero, so that every part shows in the outputs
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) / 8
            )
    return model
