"""The reasoner that comes with the package solves held-out problems on our engine, in full KV."""

import pytest
import transformers

from zipage_lang.evaluation.families import find_family
from zipage_lang.evaluation.families.family import problem_rng
from zipage_lang.runtime.model_store import resolve_model

NAMES = ("countdown", "trace", "multiply", "recall")
SEED = 11  # of problems that neither the training nor its own checks have drawn


@pytest.fixture(scope="module")
def problems():
    return [find_family(name).draw(problem_rng("held-out", SEED, 0), 0) for name in NAMES]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(resolve_model("zipage-tiny-reasoner"))


def test_every_family_is_solved_at_temperature_0_6(problems, tokenizer, driver):
    engine = driver("zipage-tiny-reasoner", max_model_len=4096, num_blocks=400)
    for problem in problems:
        tokens = tokenizer(problem.prompt)["input_ids"]
        engine.add(problem.family, tokens, max_tokens=1500, temperature=0.6, seed=1)
    engine.finish()
    for problem in problems:
        text = tokenizer.decode(engine.tokens(problem.family), skip_special_tokens=True)
        assert find_family(problem.family).check(problem.answer, text), text
