"""What is evaluated: a problem with its answer and checker, and a task made of problems.

Knows nothing of engines, models or how an answer is checked.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalProblem:
    """One prompt and what counts as right.

    `answer` is whatever JSON value the checker takes. A chat prompt goes through the model's own
    template as one user message, where it has one; any other prompt is continued as it stands.
    """

    id: str  # unique in its task
    prompt: str
    answer: Any
    checker: str
    is_chat: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Problems whose results are one row of the table."""

    name: str
    problems: tuple[EvalProblem, ...]

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError(f"task {self.name!r} has no problems")
        ids = {problem.id for problem in self.problems}
        assert len(ids) == len(self.problems), f"{self.name}: {len(ids)} ids for its problems"
