"""What a problem family is: it draws problems of a level and checks what a model wrote.

Knows nothing of models, tokens, engines or how problems are scored together.

All families share one form. A prompt begins with the family's name and ends with a newline. A
worked solution follows it, line by line; its last line is "answer: " and the answer. One character
is one token of the tiny reasoner, so lengths in characters are lengths in tokens.
"""

import random
from dataclasses import dataclass
from typing import Literal, Protocol

ANSWER_MARK = "answer: "
MIN_SOLUTION_LEN = 500  # characters; every family's every level keeps within both
MAX_SOLUTION_LEN = 3500
MAX_TEXT_LEN = 4090  # prompt and solution; leaves room for <bos> and <eos> in a context of 4,096

Split = Literal["train", "held-out"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its worked solution.

    family: name of the family that drew it.
    prompt: what a model is given; ends with a newline.
    answer: a right answer, as it stands in the solution's last line. Others may be right too.
    solution: the text that follows the prompt; prompt + solution is a whole training text.
    """

    family: str
    prompt: str
    answer: str
    solution: str


class Family(Protocol):
    """A kind of problem. Levels 0 to levels - 1 grow in difficulty and length."""

    @property
    def name(self) -> str: ...

    @property
    def levels(self) -> int: ...

    def draw(self, rng: random.Random, level: int) -> Problem:
        """A problem that depends on `rng`'s state alone. Raises ValueError for no such level."""
        ...

    def check(self, answer: str, output: str) -> bool:
        """Whether `output`, a model's text after the prompt, ends in a right answer.

        `answer` is the problem's. Text without an answer line is wrong, never an error.
        """
        ...


def final_answer(output: str) -> str | None:
    """What the last answer line of a model's text says, or None where there is no such line.

    The name of a special token behind the answer ("<eos>") is not part of it.
    """
    lines = [line for line in output.splitlines() if line.startswith(ANSWER_MARK)]
    return lines[-1][len(ANSWER_MARK) :].split("<", 1)[0].strip() if lines else None


def problem_rng(split: Split, seed: int, index: int) -> random.Random:
    """The random source of problem `index`: equal arguments, equal problem, on every machine.

    The splits never share a source, so training texts are drawn apart from held-out problems.
    """
    return random.Random(f"{split}/{seed}/{index}")


def check_level(family: Family, level: int) -> None:
    """Raises ValueError where the family has no such level."""
    if not 0 <= level < family.levels:
        raise ValueError(
            f"level={level} is none of family {family.name!r}; give 0 to {family.levels - 1}"
        )
