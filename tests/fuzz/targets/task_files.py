"""Task files of the evaluation, JSON lines and JSON: read whole, or refused with the place named.

Knows nothing of models.
"""

import json
import tempfile
from pathlib import Path

from test_support.fuzz_input import Choices, words_of

from zipage_lang.evaluation.task_files import read_task_file

ROWS = (
    {"prompt": "2 + 2?", "answer": "4", "checker": "boxed"},
    {"prompt": "x", "answer": "4", "checker": "last_number", "id": "a", "chat": False},
    {"prompt": "x", "answer": ["A"], "checker": "choice", "id": 3},
)
WORDS = (*words_of(*ROWS), "exact", "countdown", "python", "choice", "needle")


def target(data: bytes) -> None:
    choices = Choices(data)
    suffix = choices.pick((".jsonl", ".json", ".parquet"))
    text = choices.rest() if choices.flag() else file_of(choices, suffix)
    with tempfile.TemporaryDirectory(prefix="fuzz-tasks-") as folder:
        path = Path(folder) / f"tasks{suffix}"
        path.write_bytes(text)
        try:
            task = read_task_file(path)
        except ValueError as error:
            assert str(path) in str(error), error
            return
    ids = [problem.id for problem in task.problems]
    assert len(set(ids)) == len(ids)
    assert all(isinstance(problem.prompt, str) and problem.prompt for problem in task.problems)


def file_of(choices: Choices, suffix: str) -> bytes:
    rows = [choices.changed(choices.pick(ROWS), WORDS) for _ in range(choices.below(5))]
    text = "\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows)
    return choices.damaged(text.encode())
