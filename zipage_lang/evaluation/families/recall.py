"""Recall: facts derived early and stated once, a long walk of other steps, then one is asked for.

Knows nothing of models, of other families or of how answers are scored together.

Each fact is the one before plus a number of the prompt, modulo 100; the first counts from the start
of the walk. A walk adds and subtracts the same two numbers; its state and what is left to do stand
on every line. Where it stops, its last digit is the key of the fact that is asked for, and that is
where the next walk starts; so which facts are needed is known only when the walks are done:

    3:58 17+58 #3:75
    a40 12+37=49-15=34
    key 4 #4:19
"""

import random
from dataclasses import dataclass

from zipage_lang.evaluation.families.family import (
    ANSWER_MARK,
    Problem,
    check_level,
    final_answer,
)

MODULUS = 100
WALK_NAMES = "abcdef"
KEYS = 10  # last digits
COPRIME_DIGITS = (1, 3, 7, 9)  # a walk by such a step meets each last digit within ten steps


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How many facts there are, how many are asked for, and the fewest steps of each walk.

    A walk may be longer by up to num_extra steps and by KEYS - 1 more to meet a key.
    """

    num_facts: int
    num_walks: int
    min_steps: int
    num_extra: int


DIFFICULTIES = (
    Difficulty(4, 1, 26, 14),
    Difficulty(5, 1, 45, 25),
    Difficulty(6, 2, 30, 15),
    Difficulty(8, 2, 50, 15),
    Difficulty(9, 3, 36, 10),
    Difficulty(10, 2, 66, 8),
)


@dataclass(frozen=True, slots=True)
class Recall:
    """The family. The answer is the fact asked for last, two digits."""

    name: str = "recall"
    levels: int = len(DIFFICULTIES)

    def draw(self, rng: random.Random, level: int) -> Problem:
        check_level(self, level)
        difficulty = DIFFICULTIES[level]
        numbers = [rng.randrange(MODULUS) for _ in range(difficulty.num_facts)]
        start = state = rng.randrange(MODULUS)
        facts, lines = _derive(start, numbers)
        up, down = _draw_walk(rng)
        asked: set[int] = set()
        lens: list[int] = []
        for name in WALK_NAMES[: difficulty.num_walks]:
            fewest = difficulty.min_steps + rng.randint(0, difficulty.num_extra)
            open_keys = set(range(difficulty.num_facts)) - asked
            walk_len = _walk_len(state, up - down, fewest, open_keys)
            key = _walk(lines, name, walk_len, state, up, down)
            state = facts[key]
            lines.append(f"key {key} #{key}:{state:02d}")
            asked.add(key)
            lens.append(walk_len)
        prompt = _prompt(numbers, f"{start:02d}+{up:02d}-{down:02d}", lens)
        answer = f"{state:02d}"
        solution = "".join([f"{line}\n" for line in lines])
        return Problem("recall", prompt, answer, f"{solution}{ANSWER_MARK}{answer}")

    def check(self, answer: str, output: str) -> bool:
        return final_answer(output) == answer


def _prompt(numbers: list[int], walk: str, lens: list[int]) -> str:
    given = " ".join([f"{key}:{number:02d}" for key, number in enumerate(numbers)])
    asks = " ".join([f"{name}{walk_len}" for name, walk_len in zip(WALK_NAMES, lens, strict=False)])
    return f"recall {given}\nwalk {walk}\nask {asks}\n"


def _derive(start: int, numbers: list[int]) -> tuple[list[int], list[str]]:
    """The facts, and the lines that derive them."""
    facts: list[int] = []
    lines: list[str] = []
    before = start
    for key, number in enumerate(numbers):
        fact = (before + number) % MODULUS
        lines.append(f"{key}:{number:02d} {before:02d}+{number:02d} #{key}:{fact:02d}")
        facts.append(fact)
        before = fact
    return facts, lines


def _draw_walk(rng: random.Random) -> tuple[int, int]:
    """What each step adds and then subtracts; the difference is coprime to the number of keys."""
    while True:
        up, down = rng.randrange(MODULUS), rng.randrange(MODULUS)
        if (up - down) % KEYS in COPRIME_DIGITS:
            return up, down


def _walk_len(state: int, step: int, fewest: int, open_keys: set[int]) -> int:
    """The smallest number of steps, at least `fewest`, that ends on an open key."""
    for num_steps in range(fewest, fewest + KEYS):
        if (state + num_steps * step) % KEYS in open_keys:
            return num_steps
    raise AssertionError(f"a walk by {step} from {state} meets none of {open_keys}")


def _walk(lines: list[str], name: str, walk_len: int, state: int, up: int, down: int) -> int:
    """Writes a walk down and returns the key it ends on."""
    for left in range(walk_len, 0, -1):
        between = (state + up) % MODULUS
        after = (between - down) % MODULUS
        lines.append(f"{name}{left:02d} {state:02d}+{up:02d}={between:02d}-{down:02d}={after:02d}")
        state = after
    return state % KEYS
