"""Published benchmarks, read from local files in the form they are published in.

Nothing is fetched here. Knows nothing of engines or of how answers are checked.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zipage_lang.evaluation.checkers.boxed import as_text, final_answer
from zipage_lang.evaluation.code_tests import code_answer, code_prompt
from zipage_lang.evaluation.problem import EvalProblem, Task
from zipage_lang.evaluation.table_files import SUFFIXES, Row, read_rows

MATH_PROMPT = "{}\n\nReason step by step, and put your final answer in \\boxed{{}}."
_QUESTIONS = ("problem", "question", "Problem", "Question")
_ANSWERS = ("answer", "Answer")
_SOLUTIONS = ("solution", "Solution")
_IDS = ("unique_id", "question_id", "id", "ID")


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """One benchmark: where its rows come from and what is made of one."""

    name: str
    source: str  # what to fetch, for the message when it is not there
    make: Callable[[Row], tuple[str, Any, str]]  # prompt, answer, checker


def load_dataset(name: str, folder: Path) -> Task:
    """All problems of a benchmark, from `folder/NAME.jsonl` (or .json, .parquet) or from all such
    files of the folder `folder/NAME`.

    Raises ValueError that says what to fetch and where to put it.
    """
    dataset = find_dataset(name)
    problems: list[EvalProblem] = []
    for path in _files(dataset, folder):
        for number, row in enumerate(read_rows(path), 1):
            try:
                prompt, answer, checker = dataset.make(row)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, row {number}: not as {name} is published ({error}); {dataset.source}"
                ) from error
            row_id = _first(row, _IDS)
            problems.append(
                EvalProblem(
                    id=f"{len(problems)}" if row_id is None else f"{len(problems)}/{row_id}",
                    prompt=prompt,
                    answer=answer,
                    checker=checker,
                    is_chat=True,
                )
            )
    return Task(name, tuple(problems))


def find_dataset(name: str) -> Dataset:
    """Raises ValueError that lists the known ones."""
    if name not in DATASETS:
        raise ValueError(f"dataset {name!r} is not known; known: {', '.join(DATASETS)}")
    return DATASETS[name]


def _files(dataset: Dataset, folder: Path) -> list[Path]:
    single = [folder / f"{dataset.name}{suffix}" for suffix in SUFFIXES]
    found = [path for path in single if path.is_file()][:1]
    found = found or sorted(
        path for path in (folder / dataset.name).glob("*") if path.suffix in SUFFIXES
    )
    if not found:
        raise ValueError(
            f"dataset {dataset.name!r} is not in {folder}; {dataset.source}, and put it there as "
            f"{dataset.name}.jsonl or {dataset.name}.parquet, or several such files in a folder "
            f"{dataset.name}/"
        )
    return found


def _first(row: Row, names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _math_row(row: Row) -> tuple[str, Any, str]:
    question, answer = _first(row, _QUESTIONS), _first(row, _ANSWERS)
    if answer is None:  # some publish the solution only, its answer in a box
        answer = final_answer(_first(row, _SOLUTIONS) or "")
    if question is None or answer is None:
        raise ValueError(f"columns {sorted(row)} have no question or no answer")
    return MATH_PROMPT.format(question), as_text(answer), "boxed"


def _word_problem_row(row: Row) -> tuple[str, Any, str]:
    _, is_there, answer = row["answer"].rpartition("####")
    if not is_there:
        raise ValueError("the answer has no line ####")
    return MATH_PROMPT.format(row["question"]), answer.strip().replace(",", ""), "boxed"


def _code_row(row: Row) -> tuple[str, Any, str]:
    return code_prompt(row), code_answer(row), "python"


DATASETS: Mapping[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "amc23",
            "fetch math-ai/amc23 (question, answer) or AI-MO/aimo-validation-amc (problem, answer)",
            _math_row,
        ),
        Dataset(
            "aime24",
            "fetch HuggingFaceH4/aime_2024 (problem, answer) or Maxwell-Jia/AIME_2024 (Problem, "
            "Answer)",
            _math_row,
        ),
        Dataset(
            "aime25",
            "fetch math-ai/aime25 (problem, answer) or opencompass/AIME2025 (question, answer)",
            _math_row,
        ),
        Dataset("math500", "fetch HuggingFaceH4/MATH-500 (problem, answer)", _math_row),
        Dataset(
            "gsm8k",
            "fetch openai/gsm8k, main, test (question, answer with ####)",
            _word_problem_row,
        ),
        Dataset(
            "livecodebench",
            "fetch livecodebench/code_generation_lite, the files test*.jsonl (question_content, "
            "public_test_cases, private_test_cases)",
            _code_row,
        ),
    )
}
