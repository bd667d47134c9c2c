"""Countdown: reach a target from given numbers, by a search that writes out where it stands.

Knows nothing of models, of other families or of how answers are scored together.

The search is depth first: each pair of numbers in order, by +, -, * and /, with results that are
whole and from 1 to 99 (times 1 and by 1 are left out). A line is the whole path from the given
numbers to two last ones and all that these two make, so older lines may be forgotten:

    24:6 14 3 8|6+14=20|3 8 20|3+8=11|20 11|20+11=31 20-11=9

A node without a further step is left by a line that ends in "up".
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zipage_lang.evaluation.families.family import (
    ANSWER_MARK,
    Problem,
    check_level,
    final_answer,
)

MAX_VALUE = 99
MAX_GIVEN = 50
MIN_TARGET = 10  # two digits, so that every line's target takes the same room
TARGET_LEN = 3  # "24:"
STEP = re.compile(r"([0-9]{1,4})([-+*/])([0-9]{1,4})=([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How many numbers are given, and the bounds of the solution's length in characters."""

    num_given: int
    min_len: int
    max_len: int


DIFFICULTIES = (
    Difficulty(4, 500, 1100),
    Difficulty(4, 1100, 2000),
    Difficulty(4, 2000, 3000),
    Difficulty(5, 700, 1700),
    Difficulty(5, 1700, 2600),
    Difficulty(5, 2600, 3450),
)


@dataclass(frozen=True, slots=True)
class Countdown:
    """The family. Every right set of steps counts, whichever search found it."""

    name: str = "countdown"
    levels: int = len(DIFFICULTIES)

    def draw(self, rng: random.Random, level: int) -> Problem:
        check_level(self, level)
        difficulty = DIFFICULTIES[level]
        while True:
            numbers = rng.sample(range(2, MAX_GIVEN + 1), difficulty.num_given)
            problem = _draw_target(rng, numbers, difficulty)
            if problem is not None:
                return problem

    def check(self, answer: str, output: str) -> bool:
        given = final_answer(output)
        if given is None:
            return False
        task = _task_of(answer)
        return task is not None and _task_of(given) == task


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A line of the search: steps taken so far, and what the last step may be (none after "up")."""

    path: str
    taken: tuple[str, ...]
    last: list[tuple[str, int]]


def _draw_target(
    rng: random.Random, numbers: Sequence[int], difficulty: Difficulty
) -> Problem | None:
    """A problem on these numbers whose search is as long as wished; None where there is none.

    The walk does not depend on the target, so the target may be chosen for where the walk meets it.
    """
    wished_len = rng.randint(difficulty.min_len, difficulty.max_len)
    lines: list[str] = []
    lines_len = 0
    seen: set[int] = set()
    for leaf in _walk(numbers, "", ()):
        end_len = lines_len + TARGET_LEN + len(leaf.path)
        shown = ""
        for step, value in leaf.last:
            shown = f"{shown} {step}" if shown else step
            if value in seen:
                continue
            seen.add(value)
            answer = " ".join((*leaf.taken, step))
            length = end_len + len(shown) + 1 + len(ANSWER_MARK) + len(answer)
            if length > difficulty.max_len:
                return None
            if length >= wished_len and value >= MIN_TARGET:
                return _problem(value, numbers, [*lines, leaf.path + shown], answer)
        lines.append(leaf.path + shown)
        lines_len = end_len + len(shown) + 1
    return None


def _problem(target: int, numbers: Sequence[int], lines: list[str], answer: str) -> Problem:
    given = " ".join(map(str, numbers))
    search = "".join([f"{target}:{line}\n" for line in lines])
    prompt = f"countdown {target}: {given}\n"
    return Problem("countdown", prompt, answer, f"{search}{ANSWER_MARK}{answer}")


def _walk(numbers: Sequence[int], path: str, taken: tuple[str, ...]) -> Iterator[_Leaf]:
    """The lines below one node, depth first."""
    here = f"{path}{' '.join(map(str, numbers))}|"
    if len(numbers) == 2:
        yield _Leaf(here, taken, [(step, value) for _, step, value in _steps(numbers)])
        return
    for (first, second), step, value in _steps(numbers):
        rest = [number for at, number in enumerate(numbers) if at not in (first, second)]
        yield from _walk([*rest, value], f"{here}{step}|", (*taken, step))
    yield _Leaf(f"{here}up", taken, [])


def _steps(numbers: Sequence[int]) -> Iterator[tuple[tuple[int, int], str, int]]:
    """Every step that two of the numbers allow, in the order of the search."""
    tried: set[tuple[int, int]] = set()  # equal pairs would make equal lines, and a line is a place
    for first in range(len(numbers) - 1):
        for second in range(first + 1, len(numbers)):
            one, other = numbers[first], numbers[second]
            pair = (first, second)
            high, low = (one, other) if one >= other else (other, one)
            if (high, low) in tried:
                continue
            tried.add((high, low))
            if one + other <= MAX_VALUE:
                yield pair, f"{one}+{other}={one + other}", one + other
            if high > low:
                yield pair, f"{high}-{low}={high - low}", high - low
            if low == 1:
                continue
            if one * other <= MAX_VALUE:
                yield pair, f"{one}*{other}={one * other}", one * other
            if high % low == 0:
                yield pair, f"{high}/{low}={high // low}", high // low


def _task_of(steps: str) -> tuple[int, Counter[int]] | None:
    """The target that the steps reach and the numbers they use; None where a step is wrong.

    Each result but the last must be used once by a later step, each given number once.
    """
    parsed = [STEP.fullmatch(step) for step in steps.split(" ")]
    given: Counter[int] = Counter()
    made: Counter[int] = Counter()
    value = 0
    for match in parsed:
        if match is None:
            return None
        one, other, value = int(match[1]), int(match[3]), int(match[4])
        if _apply(one, match[2], other) != value:
            return None
        for number in (one, other):
            (made if made[number] else given).subtract((number,))
        made[value] += 1
    if made.total() != 1:
        return None
    return value, Counter({number: -count for number, count in given.items() if count})


def _apply(one: int, operation: str, other: int) -> int | None:
    """The result of one step; None where a division is not exact."""
    if operation == "+":
        return one + other
    if operation == "-":
        return one - other
    if operation == "*":
        return one * other
    return one // other if other and one % other == 0 else None
