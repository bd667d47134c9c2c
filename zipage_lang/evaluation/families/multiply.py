"""Multiply: long multiplication, digit by digit, with every carry and partial product written out.

Knows nothing of models, of other families or of how answers are scored together.

Digits have names, the lowest first: `p`, `q`, ... those of the factor x, `a`, `b`, ... the columns
of a row's partial product, `A`, `B`, ... those of the total so far. So whatever a step needs stands
right behind its name. What is left of the factor y, its lowest digit first, stands in each row:

    x p7 q2 r8 s4 y 693             4827 times 396
    row b9 x p7 q2 r8 s4 y 3        the row of y's second digit; its products start in column b
    p7*9=63+0=63 b3 6               digit times digit, plus carry; column b gets 3, carry 6
    C4+c4+1=09 C9 0                 total plus partial product plus carry
    total A2 B5 C9                  after each row
"""

import random
from dataclasses import dataclass

from zipage_lang.evaluation.families.family import (
    ANSWER_MARK,
    Problem,
    check_level,
    final_answer,
)

COLUMNS = "abcdefghijkl"
FACTOR_DIGITS = "pqrstu"


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How many digits the two factors have, in either order."""

    num_digits: int
    num_other_digits: int


DIFFICULTIES = (
    Difficulty(3, 4),
    Difficulty(4, 4),
    Difficulty(4, 5),
    Difficulty(5, 5),
    Difficulty(5, 6),
    Difficulty(6, 6),
)


@dataclass(frozen=True, slots=True)
class Multiply:
    """The family. The answer is the product, without leading zeros."""

    name: str = "multiply"
    levels: int = len(DIFFICULTIES)

    def draw(self, rng: random.Random, level: int) -> Problem:
        check_level(self, level)
        difficulty = DIFFICULTIES[level]
        lens = [difficulty.num_digits, difficulty.num_other_digits]
        rng.shuffle(lens)
        one, other = [rng.randrange(10 ** (num - 1), 10**num) for num in lens]
        answer = str(one * other)
        solution = "".join([f"{line}\n" for line in _work(one, other)])
        return Problem(
            "multiply", f"multiply {one}*{other}\n", answer, f"{solution}{ANSWER_MARK}{answer}"
        )

    def check(self, answer: str, output: str) -> bool:
        return final_answer(output) == answer


def _work(one: int, other: int) -> list[str]:
    """The lines of the solution."""
    digits, left = _digits(one), str(other)[::-1]
    factor = "x " + _named(FACTOR_DIGITS, digits)
    lines = [f"{factor} y {left}"]
    total: list[int] = []
    for row, digit in enumerate(_digits(other)):
        left = left[1:]
        lines.append(f"row {COLUMNS[row]}{digit} {factor} y {left}".rstrip())
        partial = _multiply_row(lines, digits, digit, row)
        total = _add_row(lines, total, partial, row) if row else partial
        lines.append("total " + _named(COLUMNS.upper(), total))
    return lines


def _multiply_row(lines: list[str], digits: list[int], digit: int, row: int) -> list[int]:
    """Writes the products of one row and returns the partial product's digits, lowest first."""
    partial, carry = [], 0
    for at, other in enumerate(digits):
        product = other * digit
        carried = product + carry
        column = COLUMNS[row + at]
        shown = f"{FACTOR_DIGITS[at]}{other}*{digit}={product:02d}+{carry}={carried:02d}"
        carry, put = divmod(carried, 10)
        lines.append(f"{shown} {column}{put} {carry}")
        partial.append(put)
    lines.append(f"end {COLUMNS[row + len(digits)]}{carry}")
    return [*partial, carry]


def _add_row(lines: list[str], total: list[int], partial: list[int], row: int) -> list[int]:
    """Writes the sum of the total and a row that starts in column `row`; returns the new total."""
    summed, carry = total[:row], 0
    for at, digit in enumerate(partial):
        column = COLUMNS[row + at]
        before = total[row + at] if row + at < len(total) else 0
        added = before + digit + carry
        shown = f"{column.upper()}{before}+{column}{digit}+{carry}={added:02d}"
        carry, put = divmod(added, 10)
        lines.append(f"{shown} {column.upper()}{put} {carry}")
        summed.append(put)
    assert carry == 0, f"total={total} and partial={partial} in row {row} carry beyond the product"
    return summed


def _digits(number: int) -> list[int]:
    """Decimal digits, the lowest first."""
    return [int(digit) for digit in reversed(str(number))]


def _named(names: str, digits: list[int]) -> str:
    return " ".join([f"{name}{digit}" for name, digit in zip(names, digits, strict=False)])
