"""Published benchmarks, by rows that we wrote in their forms. Knows nothing of the real ones."""

import base64
import json
import pickle
import zlib

import pyarrow
import pyarrow.parquet
import pytest

from zipage_lang.evaluation.checkers.find import find_checker
from zipage_lang.evaluation.datasets import DATASETS, load_dataset

STDIN_TESTS = [{"input": "3\n", "output": "9\n", "testtype": "stdin"}]
CALL_TESTS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]


def packed(tests):
    """As private tests are published."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def code_row(public, private, **fields):
    return {
        "question_title": "t",
        "question_content": "Square it.",
        "question_id": "q1",
        "starter_code": "",
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        "metadata": "{}",
        **fields,
    }


ROWS = {
    "amc23": ({"id": 0, "question": "What is $1+1$?", "answer": 2.0, "url": "u"}, "2"),
    "aime24": ({"ID": "2024-I-1", "Problem": "P?", "Solution": "s", "Answer": 204}, "204"),
    "aime25": ({"problem": "P?", "answer": "70", "id": "0"}, "70"),
    "math500": (
        {"problem": "P?", "solution": "s", "answer": r"\frac{3}{5}", "unique_id": "a/1.json"},
        r"\frac{3}{5}",
    ),
    "gsm8k": ({"question": "Q?", "answer": "2 * 600 = 1200\n#### 1,200"}, "1200"),
    "livecodebench": (
        code_row(STDIN_TESTS, packed(STDIN_TESTS)),
        [{"input": "3\n", "output": "9\n"}] * 2,
    ),
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".json"])
@pytest.mark.parametrize("name", sorted(DATASETS))
def test_a_row_becomes_a_problem_with_its_answer(tmp_path, name, suffix):
    row, answer = ROWS[name]
    write(tmp_path / f"{name}{suffix}", [row, row])
    task = load_dataset(name, tmp_path)
    assert (task.name, len(task.problems)) == (name, 2)
    problem = task.problems[0]
    assert problem.answer == answer
    assert problem.is_chat
    names = ("question", "problem", "question_content")
    question = next(value for key, value in row.items() if key.lower() in names)
    assert question in problem.prompt
    find_checker(problem.checker).check_answer(problem.answer)


def test_several_files_of_a_folder_are_one_benchmark(tmp_path):
    row, _ = ROWS["aime25"]
    write(tmp_path / "aime25" / "I.jsonl", [row])
    write(tmp_path / "aime25" / "II.jsonl", [row])
    assert [problem.id for problem in load_dataset("aime25", tmp_path).problems] == ["0/0", "1/0"]


def test_an_answer_that_only_the_solution_holds_is_taken_from_its_box(tmp_path):
    write(tmp_path / "aime24.jsonl", [{"problem": "P?", "solution": r"so \boxed{33}."}])
    assert load_dataset("aime24", tmp_path).problems[0].answer == "33"


def test_calls_of_a_function_come_with_their_starter_code(tmp_path):
    row = code_row(
        CALL_TESTS,
        json.dumps(CALL_TESTS),
        starter_code="class Solution:\n    def plus(self, items, n):",
        metadata=json.dumps({"func_name": "plus"}),
    )
    write(tmp_path / "livecodebench.jsonl", [row])
    problem = load_dataset("livecodebench", tmp_path).problems[0]
    assert problem.answer["function"] == "plus"
    assert problem.answer["tests"] == [{"input": [[1, 2], 3], "output": [4, 5]}] * 2
    assert "def plus(self, items, n):" in problem.prompt


class Harmful:
    """Unpickled by Python's own reader, it would run a command."""

    def __reduce__(self):
        return (eval, ("1/0",))


@pytest.mark.parametrize("value", [Harmful(), [1, 2], {"a": 1}])
def test_private_tests_that_are_no_plain_text_are_refused(tmp_path, value):
    private = base64.b64encode(zlib.compress(pickle.dumps(value))).decode()
    write(tmp_path / "livecodebench.jsonl", [code_row([], private)])
    with pytest.raises(ValueError, match=r"row 1: not as livecodebench is published"):
        load_dataset("livecodebench", tmp_path)


@pytest.mark.parametrize("private", ["AAAA", "no base64!", base64.b64encode(b"x").decode()])
def test_private_tests_that_are_broken_are_refused(tmp_path, private):
    write(tmp_path / "livecodebench.jsonl", [code_row([], private)])
    with pytest.raises(ValueError, match="row 1: not as livecodebench is published"):
        load_dataset("livecodebench", tmp_path)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_what_is_missing_is_told_with_what_to_fetch_and_where_to_put_it(tmp_path, name):
    with pytest.raises(ValueError) as caught:
        load_dataset(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"dataset {name!r} is not in {tmp_path}; fetch ")
    assert f"put it there as {name}.jsonl" in message


@pytest.mark.parametrize("name", ["aime25", "gsm8k", "livecodebench"])
def test_a_row_of_another_form_is_told_with_file_and_row(tmp_path, name):
    write(tmp_path / f"{name}.jsonl", [{"text": "something else"}])
    with pytest.raises(ValueError, match=rf"{name}.jsonl, row 1: not as {name} is published"):
        load_dataset(name, tmp_path)


def test_an_unknown_benchmark_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="known: amc23, aime24"):
        load_dataset("mmlu", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("aime25.jsonl", b"{broken", "line 1: not JSON"),
        ("aime25.jsonl", b"[1]\n", "each row must be a JSON object"),
        ("aime25.json", b"{}", "each row must be a JSON object"),
        ("aime25.parquet", b"no parquet", "not a parquet file"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_dataset("aime25", tmp_path)
