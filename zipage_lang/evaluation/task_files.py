"""Tasks written by a user: JSON lines with `prompt`, `answer` and `checker`.

Knows nothing of published benchmarks or of how answers are checked.
"""

from pathlib import Path
from typing import Any

from zipage_lang.evaluation.checkers.find import find_checker
from zipage_lang.evaluation.problem import EvalProblem, Task
from zipage_lang.evaluation.table_files import read_rows

_REQUIRED = ("prompt", "answer", "checker")
_KNOWN = {*_REQUIRED, "id", "chat"}


def read_task_file(path: Path) -> Task:
    """One problem a line: `{"prompt": ..., "answer": ..., "checker": "boxed"}`.

    `id` (else the row's number) and `chat` (true; false continues the prompt as it stands) are
    optional. Raises ValueError that names file and row, OSError where there is no file.
    """
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path}: task {path.stem!r} has no problems; give one row at least")
    problems = []
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        try:
            problem = _problem(row, number)
            if problem.id in seen:
                raise ValueError(f"id={problem.id!r} is there twice")
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
        seen.add(problem.id)
        problems.append(problem)
    return Task(path.stem, tuple(problems))


def _problem(row: dict[str, Any], number: int) -> EvalProblem:
    missing = [name for name in _REQUIRED if name not in row]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing; a row needs {', '.join(_REQUIRED)}")
    unknown = sorted(row.keys() - _KNOWN)
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not known; a row may have {', '.join(sorted(_KNOWN))}")
    prompt, checker, is_chat = row["prompt"], row["checker"], row.get("chat", True)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"prompt={prompt!r:.80} must be a text")
    if not isinstance(checker, str):
        raise ValueError(f"checker={checker!r:.80} must be a text")
    if not isinstance(is_chat, bool):
        raise ValueError(f"chat={is_chat!r:.80} must be true or false")
    find_checker(checker).check_answer(row["answer"])
    return EvalProblem(
        id=str(row.get("id", number)),
        prompt=prompt,
        answer=row["answer"],
        checker=checker,
        is_chat=is_chat,
    )
