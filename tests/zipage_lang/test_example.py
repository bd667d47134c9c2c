import importlib.util
import io
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from zipage_lang.testing import ScriptedBackend

PATH = Path(__file__).parents[2] / "examples" / "self_consistency.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("self_consistency_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("chain", "answer"),
    [
        ("3 + 2 = 5. The answer is 5.", "5"),
        ("The answer is: 1,024 pages", "1024"),
        ("The answer is 7. No, the answer is 8.", "8"),
        ("I do not know", "none"),
    ],
)
def test_answer_is_the_last_one_a_chain_names(example, chain, answer):
    assert example.answer_in(chain) == answer


def test_the_program_counts_votes_and_reports_tokens_on_the_way(example):
    replies = ["The answer is 10.", "The answer is 8.", "The answer is 10."]
    seen = []
    backend = ScriptedBackend(replies)
    state = example.self_consistency.run("Q?", 3, seen.append, backend=backend)
    assert state.ret_value == Counter({"10": 2, "8": 1})
    outputs = state.meta("chain")
    assert sum(seen) == sum(output.usage.completion_tokens for output in outputs)
    console = Console(width=80, file=io.StringIO())
    console.print(example.table_of(outputs, state.ret_value, seconds=2.0))
    table = console.file.getvalue()
    assert "2 of 3" in table
    assert f"{sum(seen) / 2.0:.1f}" in table
